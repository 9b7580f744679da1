"""A multi-modal inference server: text, images and a clip in any mix, one streamed answer.

Five floors; imports go down only.

    doors        __main__  cli/  gateway/  bench/  evals/
    engine       engine  sync_engine  active_request  background  costs  request_records  decoder_groups  decoder_group
                 decoder_specs  replica_set  replica  supervisor
                 media_service  media_room  encoder_lanes  supervised_encoder  tokenizer  chat_template  token_fuser  prompt_maker
                 modality_router  model_router  request_router  route_classifier  escalation  doubt  token_stream  readiness  quarantine
                 quota  tenants  tenant_watch  ledger  ledger_tables  spool  usage  hit_watch  guardrail  grounding/  answer_quality
                 rate_watch  recent_answers  canary  canary_records  canary_shadows  canaries  media_fetches  loop_lag
    departments  scheduler/  encoders/           (they never import each other)
                 planner/  (formulas alone, with the scheduler's constants)
    memory       paged_kv/
    vocabulary   errors  config  composition  media  request  plan  shared_buffer  transport  child_process  metrics  clock
                 roofline/  (what a card takes for a step)

    basement     worker/  models/  encoders/vision_tower  encoders/audio_tower  encoders/qwen2_audio_tower  encoders/ultravox_tower
                 encoders/qwen2_5_omni_towers  (in worker processes; the only place with torch)
                 sim/  (workers of a simulated device, which need none)

One request, two images and a clip:

     1  gateway          who is it, may it have one more, is the body small enough
     2  chat_api         JSON -> ChatRequest, or BadRequest here and nowhere else
     3  modality_router  which pools see it; model_router says small or large, and why
     4  media_service    digest and header of each item: 576 + 576 + 375 rows are known, nothing is decoded
     5  tokenizer        chat template -> pieces; token_fuser lays them end to end -> ids and spans
     6  admission        would it ever fit? is the queue short enough, the quota large enough? else 4xx or 503, now
     7  replica_set      placed on a replica: longest cached prefix, least pending work, least harm to those who are there
     8  scheduler        what does it wait for? -> encoder_pool: in the cache? in flight? else decode process, micro-batch, tower
     9  replica          plan -> worker -> result: text at once, spans when their rows have landed, then a token a step
    10  active_request   token -> text, stop strings -> Delta on the token_stream
    11  gateway          one write for all that waits; finish reason, usage, [DONE]
    12  engine._end      blocks, pins, room and quota back, ledger row; exactly once, however it ended

A worker that dies takes KV bytes with it and nothing else: its sequences catch up elsewhere, or when it is back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmserve.config import Config
    from mmserve.engine import AsyncEngine
    from mmserve.request import ChatRequest, Message, SamplingParams
    from mmserve.sync_engine import Audio, Engine, Image

__all__ = ["AsyncEngine", "Audio", "ChatRequest", "Config", "Engine", "Image", "Message", "SamplingParams"]

_HOMES = {
    "AsyncEngine": "engine",
    "Audio": "sync_engine",
    "ChatRequest": "request",
    "Config": "config",
    "Engine": "sync_engine",
    "Image": "sync_engine",
    "Message": "request",
    "SamplingParams": "request",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that a worker never pays for the doors."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mmserve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"mmserve.{_HOMES[name]}"), name)
