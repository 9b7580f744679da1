// Sound in the browser: a recording, or any file it can decode, becomes a mono 16-bit WAV at the encoder's rate.

export const RATE = 16000;

/** Samples in [-1, 1] -> the bytes of a WAV file. */
export function encodeWav(samples, rate = RATE) {
  const bytes = new DataView(new ArrayBuffer(44 + samples.length * 2));
  const text = (at, word) => [...word].forEach((c, i) => bytes.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"); bytes.setUint32(4, 36 + samples.length * 2, true); text(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true); bytes.setUint16(20, 1, true); bytes.setUint16(22, 1, true);
  bytes.setUint32(24, rate, true); bytes.setUint32(28, rate * 2, true); bytes.setUint16(32, 2, true); bytes.setUint16(34, 16, true);
  text(36, "data"); bytes.setUint32(40, samples.length * 2, true);
  for (let i = 0; i < samples.length; i++) {
    const s = Math.max(-1, Math.min(1, samples[i]));
    bytes.setInt16(44 + i * 2, Math.round(s * 32767), true);
  }
  return new Blob([bytes.buffer], { type: "audio/wav" });
}

/** Any sound the browser can decode -> WAV. */
export async function toWav(blob) {
  const context = new AudioContext();
  try {
    const sound = await context.decodeAudioData(await blob.arrayBuffer());
    const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(sound.duration * RATE)), RATE);
    const source = new AudioBufferSourceNode(offline, { buffer: sound });
    source.connect(offline.destination);
    source.start();
    return encodeWav((await offline.startRendering()).getChannelData(0));
  } finally {
    await context.close();
  }
}

/** Records from the microphone until `stop`; `onLevel` gets the loudness (0 to 1) and the seconds so far. */
export class Recorder {
  async start(onLevel) {
    if (!navigator.mediaDevices) throw new Error("Recording needs localhost or HTTPS.");
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, noiseSuppression: false } });
    this.context = new AudioContext();
    const analyser = new AnalyserNode(this.context, { fftSize: 1024 });
    this.context.createMediaStreamSource(this.stream).connect(analyser);
    this.media = new MediaRecorder(this.stream);
    this.pieces = [];
    this.media.ondataavailable = (event) => this.pieces.push(event.data);
    this.media.start();
    const began = performance.now(), wave = new Float32Array(analyser.fftSize);
    this.timer = setInterval(() => {
      analyser.getFloatTimeDomainData(wave);
      onLevel(Math.min(1, 4 * Math.hypot(...wave) / Math.sqrt(wave.length)), (performance.now() - began) / 1000);
    }, 80);
  }

  /** The WAV. */
  async stop() {
    clearInterval(this.timer);
    const stopped = new Promise((done) => { this.media.onstop = done; });
    this.media.stop();
    await stopped;
    this.stream.getTracks().forEach((track) => track.stop());
    await this.context.close();
    return toWav(new Blob(this.pieces, { type: this.media.mimeType }));
  }
}
