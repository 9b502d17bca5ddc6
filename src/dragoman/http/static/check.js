// Checks JSON while the user types it. The server validates it again when it is sent.

/** Returns {value}, or {error} with its position. */
export function readJson(text) {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    const found = /position (\d+)/.exec(error.message);
    const at = found ? Number(found[1]) : text.length;
    const before = text.slice(0, at).split("\n");
    const what = describeSyntax(text, at);
    return { error: `Line ${before.length}, column ${before.at(-1).length + 1}: ${what}`, at };
  }
}

function describeSyntax(text, at) {
  const here = text[at];
  const before = text.slice(0, at).trimEnd().at(-1);
  if (here === undefined) return "the JSON is incomplete.";
  if ((here === "}" || here === "]") && before === ",") return `remove the comma before ${here}.`;
  if (here === "'") return "strings need double quotes.";
  if (here === "\n") return "a string is not closed in this line.";
  if (here === '"' && before && '"}]0123456789el'.includes(before)) return "a comma is missing here.";
  if (before === "{" || before === ",") return "expected the name of a field in double quotes.";
  return `${JSON.stringify(here)} is not expected here.`;
}

const TYPES = new Set(["string", "number", "integer", "boolean", "object", "array", "null"]);
const NUMBERS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
const COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];
const SCHEMAS = ["items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else", "unevaluatedProperties"];
const LISTS = ["anyOf", "oneOf", "allOf", "prefixItems"];
const MAPS = ["properties", "$defs", "definitions", "patternProperties"];
const MOST_DEEP = 64;

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** Returns the first error of a JSON Schema, or null. */
export function checkSchema(schema, place = "#", depth = 0) {
  if (typeof schema === "boolean" || depth > MOST_DEEP) return null;
  if (!isObject(schema)) return `${place} must be an object.`;
  return checkWords(schema, place) ?? checkBelow(schema, place, depth);
}

function checkWords(schema, place) {
  const { type, required } = schema;
  const types = Array.isArray(type) ? type : type === undefined ? [] : [type];
  const strange = types.find((one) => !TYPES.has(one));
  if (strange !== undefined) return `${place}/type: ${JSON.stringify(strange)} is not a valid type; allowed are ${[...TYPES].join(", ")}.`;
  if (required !== undefined && !(Array.isArray(required) && required.every((one) => typeof one === "string"))) return `${place}/required must be a list of names.`;
  if (schema.enum !== undefined && !(Array.isArray(schema.enum) && schema.enum.length)) return `${place}/enum must be a list of values.`;
  const noNumber = NUMBERS.find((name) => schema[name] !== undefined && typeof schema[name] !== "number");
  if (noNumber) return `${place}/${noNumber} must be a number.`;
  const noCount = COUNTS.find((name) => schema[name] !== undefined && !(Number.isInteger(schema[name]) && schema[name] >= 0));
  if (noCount) return `${place}/${noCount} must be an integer of at least 0.`;
  return checkPattern(schema, place) ?? checkRequired(schema, place);
}

function checkPattern({ pattern }, place) {
  if (pattern === undefined) return null;
  try {
    new RegExp(pattern, "u");
    return null;
  } catch {
    return `${place}/pattern is not a valid regular expression.`;
  }
}

function checkRequired({ required, properties, additionalProperties }, place) {
  const unknown = additionalProperties === false ? (required ?? []).find((name) => !Object.hasOwn(properties ?? {}, name)) : undefined;
  return unknown === undefined ? null : `${place}/required: ${JSON.stringify(unknown)} is not in properties, and additionalProperties is false.`;
}

function checkBelow(schema, place, depth) {
  for (const name of SCHEMAS) {
    const wrong = schema[name] === undefined ? null : checkSchema(schema[name], `${place}/${name}`, depth + 1);
    if (wrong) return wrong;
  }
  for (const name of LISTS) {
    if (schema[name] === undefined) continue;
    if (!Array.isArray(schema[name]) || !schema[name].length) return `${place}/${name} must be a list of schemas.`;
    const wrong = schema[name].map((one, at) => checkSchema(one, `${place}/${name}/${at}`, depth + 1)).find(Boolean);
    if (wrong) return wrong;
  }
  for (const name of MAPS) {
    if (schema[name] === undefined) continue;
    if (!isObject(schema[name])) return `${place}/${name} must be an object of schemas.`;
    const wrong = Object.entries(schema[name]).map(([key, one]) => checkSchema(one, `${place}/${name}/${key}`, depth + 1)).find(Boolean);
    if (wrong) return wrong;
  }
  return null;
}

/** Returns the first error of a list of tools, or null. */
export function checkTools(tools) {
  if (!Array.isArray(tools)) return "Tools must be a list: [{\"type\": \"function\", \"function\": {…}}].";
  const names = new Set();
  for (const [at, tool] of tools.entries()) {
    const place = `Tool ${at + 1}`;
    if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) return `${place} must be {"type": "function", "function": {…}}.`;
    const { name, description, parameters } = tool.function;
    if (typeof name !== "string" || !/^[\w.-]{1,64}$/.test(name)) return `${place}: "name" must be 1 to 64 letters, digits, "_", "-" or ".".`;
    if (names.has(name)) return `${place}: the name ${name} is used twice; names must differ.`;
    names.add(name);
    if (description !== undefined && typeof description !== "string") return `${place}: "description" must be a string.`;
    const wrong = parameters === undefined ? null : checkSchema(parameters, `${name}: #`);
    if (wrong) return wrong;
  }
  return null;
}
