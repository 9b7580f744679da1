// The playground: what is attached, what was said, and a reader of the server's event stream.

import { Recorder, toWav } from "./record.js";

const $ = (id) => document.getElementById(id);
const MAX_IMAGES = 8, MAX_PIXELS = 16e6, MAX_RECORDING_S = 30;
const IMAGE_TYPES = ["image/jpeg", "image/png", "image/gif", "image/webp"];
const AUDIO_TYPES = ["audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/flac", "audio/x-flac", "audio/ogg", "audio/mpeg", "audio/mp3"];
const IDEAS = ["What is in the picture?", "What colour is the background?", "What do you hear?", "Hello! Who are you?"];

let attached = [];   // {kind, url (data: URI), name}
let turns = [];      // {parts, answer}
let running = null;  // AbortController of the answer on its way
let recorder = null;

// ---- attachments ----------------------------------------------------------------------------------------------------

const dataUrl = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});

/** A picture the server takes as it is, or one drawn anew: other formats, and what has too many pixels. */
async function imageUrl(file) {
  let picture;
  try {
    picture = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    if (IMAGE_TYPES.includes(file.type)) return dataUrl(file);  // let the server say what is wrong with it
    throw new Error(`This browser can't read ${file.name}.`);
  }
  const scale = Math.min(1, Math.sqrt(MAX_PIXELS / (picture.width * picture.height)));
  if (scale === 1 && IMAGE_TYPES.includes(file.type)) return dataUrl(file);
  const canvas = new OffscreenCanvas(Math.floor(picture.width * scale), Math.floor(picture.height * scale));
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return dataUrl(await canvas.convertToBlob(scale < 1 ? { type: "image/jpeg", quality: 0.92 } : { type: "image/png" }));
}

async function audioUrl(file) {
  if (AUDIO_TYPES.includes(file.type)) return dataUrl(file);
  try {
    return await dataUrl(await toWav(file));
  } catch {
    throw new Error(`This browser can't decode ${file.name}.`);
  }
}

async function attach(files) {
  for (const file of files) {
    try {
      if (file.type.startsWith("image/")) {
        if (attached.filter((one) => one.kind === "image").length >= MAX_IMAGES) throw new Error(`At most ${MAX_IMAGES} pictures.`);
        attached.push({ kind: "image", url: await imageUrl(file), name: file.name });
      } else if (file.type.startsWith("audio/") || file.type === "video/webm") {
        const clip = { kind: "audio", url: await audioUrl(file), name: file.name };
        attached = [...attached.filter((one) => one.kind !== "audio"), clip];
      } else {
        throw new Error(`${file.name} is neither a picture nor a clip.`);
      }
      notice("");
    } catch (error) {
      notice(error.message, true);
    }
  }
  showAttached();
}

function showAttached() {
  $("attached").hidden = attached.length === 0;
  $("attached").replaceChildren(...attached.map((one) => {
    const chip = make("div", "chip");
    chip.append(one.kind === "image" ? preview(one) : wrap("div", "clip", preview(one)));
    const remove = make("button", "remove", "×");
    remove.type = "button";
    remove.title = `Remove ${one.name}`;
    remove.onclick = () => { attached = attached.filter((other) => other !== one); showAttached(); };
    chip.append(remove);
    return chip;
  }));
  refreshSend();
}

function preview(one) {
  const element = document.createElement(one.kind === "image" ? "img" : "audio");
  if (one.kind === "image") element.alt = one.name; else element.controls = true;
  element.src = one.url;
  return element;
}

// ---- recording ------------------------------------------------------------------------------------------------------

async function toggleRecording() {
  if (recorder) return stopRecording();
  const mine = recorder = new Recorder();
  try {
    await mine.start((level, seconds) => {
      $("level").value = level;
      $("record").querySelector("span").textContent = `Stop ${seconds.toFixed(1)} s`;
      if (seconds > MAX_RECORDING_S) stopRecording();
    });
    $("record").classList.add("recording");
    $("level").hidden = false;
    notice("");
  } catch (error) {
    recorder = null;
    notice(error.name === "NotAllowedError" ? "The browser was not allowed to use the microphone." : error.message, true);
  }
}

async function stopRecording() {
  const mine = recorder;
  recorder = null;
  $("record").classList.remove("recording");
  $("level").hidden = true;
  $("record").querySelector("span").textContent = "Record";
  try {
    await attach([new File([await mine.stop()], "recording.wav", { type: "audio/wav" })]);
  } catch {
    notice("Nothing was recorded.", true);
  }
}

// ---- asking ---------------------------------------------------------------------------------------------------------

const part = (one) => one.kind === "image"
  ? { type: "image_url", image_url: { url: one.url } }
  : { type: "audio_url", audio_url: { url: one.url } };

/** Earlier turns go along if asked for; of their media, the latest that still fit a request. */
function messages(parts) {
  const all = $("history").checked ? turns.filter((turn) => turn.answer).map((turn) => [turn.parts, turn.answer]) : [];
  const left = { image_url: MAX_IMAGES, audio_url: 1 };
  const fitting = (list) => list.filter((one) => !(one.type in left) || left[one.type]-- > 0);
  const last = { role: "user", content: fitting(parts) };
  const before = all.reverse().flatMap(([asked, answer]) => [{ role: "assistant", content: answer }, { role: "user", content: fitting(asked) }]);
  return [...before.reverse(), last];
}

async function ask() {
  const text = $("question").value.trim();
  if (running) return running.abort();
  if (!text && attached.length === 0) return;
  const media = [...attached];
  const parts = [...media.map(part), ...(text ? [{ type: "text", text }] : [])];
  const turn = { parts, answer: "" };
  const view = showTurn(text, media);
  const body = {
    model: $("model").value || "auto", messages: messages(parts), stream: true, stream_options: { include_usage: true }, explain: true,
    temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value) || 200,
  };
  turns.push(turn);
  $("question").value = "";
  grow();
  running = new AbortController();
  refreshSend();
  const facts = { began: performance.now() };
  try {
    await stream(body, running.signal, (chunk) => {
      const piece = chunk.choices[0]?.delta?.content;
      if (piece) {
        facts.first ??= performance.now();
        turn.answer += piece;
        view.answer.textContent = turn.answer;
        stick();
      }
      if (chunk.choices[0]?.finish_reason) facts.reason = chunk.choices[0].finish_reason;
      if (chunk.usage) facts.usage = chunk.usage;
      if (chunk.mmserve) facts.explained = chunk.mmserve;
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      view.answer.classList.add("failed");
      view.answer.textContent = turn.answer ? `${turn.answer}\n\n${error.message}` : error.message;
    }
    if (!turn.answer) turns = turns.filter((one) => one !== turn);
  } finally {
    facts.ended = performance.now();
    running = null;
    view.answer.classList.remove("running");
    showFacts(view.facts, facts);
    refreshSend();
    stick();
  }
}

/** Calls `onChunk` with each object of the stream; throws what the server says if it says no. */
async function stream(body, signal, onChunk) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await fetch("/v1/chat/completions", request).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server can't be reached.");
  });
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `The server said ${response.status}.`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ") || block === "data: [DONE]") continue;
      const chunk = JSON.parse(block.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      onChunk(chunk);
    }
  }
}

// ---- what is seen ---------------------------------------------------------------------------------------------------

function showTurn(text, media) {
  $("hello").hidden = true;
  const turn = make("section", "turn"), mine = make("div", "mine"), answer = make("div", "answer running"), facts = make("div", "facts");
  if (media.length) mine.append(wrap("div", "media", ...media.map((one) => {
    const element = preview(one);
    if (one.shown) element.className = "again";  // attachments stay for the next question; once large is enough
    one.shown = true;
    return element;
  })));
  if (text) mine.append(make("div", "words", text));
  turn.append(mine, answer, facts);
  $("talk").append(turn);
  stick(true);
  return { answer, facts };
}

function showFacts(row, { began, first, ended, reason, usage, explained }) {
  const seconds = (ms) => ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
  const facts = [];
  if (explained) facts.push(pill(explained.route.model, `why: ${explained.route.reason}`));
  for (const one of explained?.media ?? []) {
    const hit = one.source !== "encoded" && one.source !== "joined";
    facts.push(pill(`${one.kind}: ${one.tokens} tokens, ${hit ? `from ${one.source}` : one.source}`, one.hash, hit));
  }
  if (first) facts.push(make("span", "", `first word after ${seconds(first - began)}`));
  if (usage) {
    const rate = first && usage.completion_tokens > 1 ? `, ${Math.round((usage.completion_tokens - 1) / ((ended - first) / 1000))} a second` : "";
    facts.push(make("span", "", `${usage.completion_tokens} tokens${rate}`));
    const cached = usage.prompt_tokens_details?.cached_tokens;
    facts.push(make("span", "", `prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`));
  }
  if (reason === "length") facts.push(pill("cut at the longest answer", "see Settings"));
  if (!usage) facts.push(make("span", "", "stopped"));
  if (explained) facts.push(...thumbs(explained.request_id));
  row.replaceChildren(...facts);
}

function thumbs(requestId) {
  const buttons = [["up", "👍", "A good answer"], ["down", "👎", "A bad answer"]].map(([rating, face, title]) => {
    const button = make("button", "", face);
    button.type = "button";
    button.title = title;
    button.onclick = async () => {
      const body = JSON.stringify({ request_id: requestId, rating });
      const response = await fetch("/v1/feedback", { method: "POST", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
      if (!response?.ok) return notice("The feedback could not be sent.", true);
      buttons.forEach((one) => one.setAttribute("aria-pressed", one === button));
    };
    return button;
  });
  return buttons;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function wrap(tag, className, ...children) {
  const element = make(tag, className);
  element.append(...children);
  return element;
}

function pill(text, title, hit = false) {
  const element = make("span", hit ? "pill hit" : "pill", text);
  element.title = title;
  return element;
}

function notice(text, bad = false) {
  $("notice").textContent = text;
  $("notice").classList.toggle("bad", bad);
}

function stick(always = false) {
  const talk = $("talk");
  if (always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160) talk.scrollTop = talk.scrollHeight;
}

function grow() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
  refreshSend();
}

function refreshSend() {
  $("send").classList.toggle("stop", running !== null);
  $("send").querySelector("span").textContent = running ? "Stop" : "Ask";
  $("send").disabled = !running && !$("question").value.trim() && attached.length === 0;
}

// ---- the server -----------------------------------------------------------------------------------------------------

async function greet() {
  const models = await fetch("/v1/models").then((response) => response.json()).catch(() => null);
  if (!models?.data) {
    notice("The model is loading ...");
    setTimeout(greet, 1500);
    return;
  }
  notice("");
  $("served").textContent = models.data[0].id;
  $("model").replaceChildren(...models.data.map((one, i) => new Option(i === 0 ? `${one.id} (auto)` : one.id, one.id)));
  await showHealth(models.data[0].modalities);
}

async function showHealth(modalities) {
  const health = await fetch("/health/ready").then((response) => response.json()).catch(() => ({}));
  $("routes").replaceChildren(...modalities.map((name) => {
    const item = make("li", health.works?.[name] ? "works" : "broken", name);
    item.title = health.works?.[name] ? "works" : "does not work right now";
    return item;
  }));
  setTimeout(() => showHealth(modalities), 10_000);
}

// ---- wiring ---------------------------------------------------------------------------------------------------------

$("composer").onsubmit = (event) => { event.preventDefault(); ask(); };
$("question").oninput = grow;
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) ask(); }
};
$("pick").onclick = () => $("files").click();
$("files").onchange = async () => { await attach([...$("files").files]); $("files").value = ""; };
$("record").onclick = toggleRecording;
$("clear").onclick = () => {
  running?.abort();
  turns = []; attached = [];
  document.querySelectorAll(".turn").forEach((one) => one.remove());
  $("hello").hidden = false;
  showAttached();
  $("question").focus();
};
$("temperature").oninput = () => { $("temperature-shown").textContent = $("temperature").value; };
document.addEventListener("click", (event) => { if (!$("settings").contains(event.target)) $("settings").open = false; });
document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (files.length) { event.preventDefault(); attach(files); }
});
let depth = 0;  // dragenter and dragleave come for every element on the way
document.addEventListener("dragenter", (event) => { if (event.dataTransfer?.types.includes("Files")) { depth++; $("drop").hidden = false; } });
document.addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); if (!depth) $("drop").hidden = true; });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); depth = 0; $("drop").hidden = true; attach([...event.dataTransfer.files]); });
$("ideas").append(...IDEAS.map((text) => {
  const button = make("button", "", text);
  button.type = "button";
  button.onclick = () => { $("question").value = text; grow(); $("question").focus(); };
  return button;
}));
refreshSend();
greet();
