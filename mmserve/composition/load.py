"""From model directories to a composition: our own format is one as it stands, published ones are a decoder each, with its encoders."""

from __future__ import annotations

from pathlib import Path

from mmserve.composition.composed import FILE, read_composed
from mmserve.composition.model import Model
from mmserve.composition.published import read_published
from mmserve.composition.specs import Composition
from mmserve.composition.weights import BadModel

BUNDLED = Path(__file__).parent.parent / "models" / "tiny"


def load_composition(
    directory: Path | None = None, *, small: Path | None = None, large: Path | None = None, chat_template: Path | None = None
) -> Composition:
    """A directory of any format, or one published directory for each decoder; without any, the bundled model.

    `chat_template` goes before the directories' own.  Raises BadModel naming what is missing, wrong or not built.
    """
    given = {name: path for name, path in (("small", small), ("large", large)) if path is not None}
    if directory is not None and given:
        raise BadModel("give either model, or small and large")
    paths = given or {"small": directory or BUNDLED}
    for path in paths.values():
        if (path / FILE).exists():
            if len(paths) > 1:
                raise BadModel(f"{path} is a composition with decoders of its own: it can't be one of two")
            return read_composed(path, chat_template)
    models = {name: read_published(name, path, chat_template) for name, path in paths.items()}
    return _compose(next(iter(paths.values())).resolve().name, models)


def _compose(name: str, models: dict[str, Model]) -> Composition:
    return Composition(
        name,
        {decoder: model.decoder for decoder, model in models.items()},
        {decoder: model.vision for decoder, model in models.items() if model.vision is not None},
        {decoder: model.audio for decoder, model in models.items() if model.audio is not None},
    )
