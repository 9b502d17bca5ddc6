// Files attached to a message: reads supported ones, and rejects others with a reason.

const MOST_BYTES = 10 * 1024 * 1024;
const TEXT_BYTES = 64 * 1024;

/** Returns {taken: [{name, type, size, data}], refused: [reason]}. */
export async function readFiles(files, model, already) {
  const taken = [];
  const refused = [];
  let size = already.reduce((sum, file) => sum + file.size, 0);
  for (const file of files) {
    size += file.size;
    const why = size > MOST_BYTES ? "the files of a message have more than 10 MB together" : await problemWith(file, model);
    if (why) refused.push(`${file.name}: ${why}.`);
    else taken.push({ name: file.name, type: typeOf(file), size: file.size, data: await base64(file) });
  }
  return { taken, refused };
}

/** Returns "image" or "audio" for media that models may take, undefined for other types. */
export function mediaKind(type) {
  return /^image\/(png|jpeg|webp|gif)$/.test(type) ? "image" : /^audio\/((x-)?wav|wave|mpeg|mp3|(x-)?flac)$/.test(type) ? "audio" : undefined;
}

function typeOf(file) {
  return mediaKind(file.type) ? file.type : isPdf(file) ? "application/pdf" : "text/plain";
}

function isPdf(file) {
  return file.type === "application/pdf" || /\.pdf$/i.test(file.name);
}

async function problemWith(file, model) {
  const name = model?.id ?? "this model";
  const takes = model?.input_modalities ?? ["text"];
  if (takes.includes(mediaKind(file.type))) return null;
  if (takes.length > 1 && /^(image|audio|video)\//.test(file.type) && !/svg/.test(file.type)) return `${name} takes only ${takes.join(" and ")}, in common formats`;
  if (file.type.startsWith("image/") && !/svg/.test(file.type)) return `${name} takes only text, no images`;
  if (/^(audio|video)\//.test(file.type)) return `${name} takes only text, no audio or video`;
  if (isPdf(file)) return null;
  const bytes = new Uint8Array(await file.slice(0, TEXT_BYTES).arrayBuffer());
  if (bytes.includes(0)) return "the file is neither text nor PDF";
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: file.size > TEXT_BYTES });
    return null;
  } catch {
    return "the file is neither UTF-8 text nor PDF";
  }
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
