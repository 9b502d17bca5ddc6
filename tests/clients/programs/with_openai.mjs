// The official SDK of JavaScript: what it gave back goes back as it is.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import * as cases from './cases.mjs';

const { MODEL, given } = cases;
const client = (baseURL) => new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const ask = (content) => ({ role: 'user', content });
const Place = z.object({ city: z.string() });
const TOOL = { type: 'function', function: { name: 'weather', parameters: cases.PARAMETERS } };
const STRICT = zodFunction({ name: 'weather', parameters: Place, function: cases.weather });
const FLAT = { type: 'function', name: 'weather', parameters: cases.PARAMETERS, strict: false };

const told = (message) => [
  message,
  ...message.tool_calls.map((call) => ({
    role: 'tool',
    tool_call_id: call.id,
    content: cases.weather(JSON.parse(call.function.arguments)),
  })),
];

given('chat', 'plain', async (url) => {
  const made = await client(url).chat.completions.create({ model: MODEL, messages: [ask(cases.NAME_A_COLOUR)] });
  assert.equal(made.choices[0].message.content, cases.COLOUR);
});

given('chat', 'stream', async (url) => {
  const messages = [ask(cases.NAME_A_COLOUR)];
  let text = '';
  for await (const chunk of await client(url).chat.completions.create({ model: MODEL, messages, stream: true }))
    text += chunk.choices[0]?.delta.content ?? '';
  assert.equal(text, cases.COLOUR);
});

given('chat', 'tools', async (url) => {
  const messages = [ask(cases.HOW_WARM)];
  for (const wanted of [null, cases.WARM]) {
    const made = await client(url).chat.completions.create({ model: MODEL, messages, tools: [TOOL] });
    const { message } = made.choices[0];
    if (wanted) assert.equal(message.content, wanted);
    else messages.push(...told(message));
  }
});

given('chat', 'reasoning', async (url) => {
  const messages = [ask(cases.THINK_OF_A_COLOUR)];
  const { message } = (await client(url).chat.completions.create({ model: MODEL, messages })).choices[0];
  assert.equal(message.reasoning_content, cases.THOUGHT);
  messages.push(message, ask(cases.NAME_A_COLOUR));
  const again = await client(url).chat.completions.create({ model: MODEL, messages });
  assert.equal(again.choices[0].message.content, cases.COLOUR);
});

given('chat', 'parse() of calls, appended', async (url) => {
  const messages = [ask(cases.HOW_WARM)];
  for (const wanted of [null, cases.WARM]) {
    const made = await client(url).chat.completions.parse({ model: MODEL, messages, tools: [STRICT] });
    const { message } = made.choices[0];
    if (wanted) assert.equal(message.content, wanted);
    else messages.push(...told(message));
  }
});

given('chat', 'parse() of an object, appended', async (url) => {
  const messages = [ask(cases.WHICH_CITY)];
  const response_format = zodResponseFormat(Place, 'place');
  const { message } = (await client(url).chat.completions.parse({ model: MODEL, messages, response_format }))
    .choices[0];
  assert.deepEqual(message.parsed, { city: 'Paris' });
  messages.push(message, ask(cases.NAME_A_COLOUR));
  const again = await client(url).chat.completions.create({ model: MODEL, messages });
  assert.equal(again.choices[0].message.content, cases.COLOUR);
});

given('chat', 'stream() helper, appended', async (url) => {
  const messages = [ask(cases.HOW_WARM)];
  const stream = client(url).chat.completions.stream({ model: MODEL, messages, tools: [STRICT] });
  messages.push(...told(await stream.finalMessage()));
  const again = client(url).chat.completions.stream({ model: MODEL, messages, tools: [STRICT] });
  assert.equal(await again.finalContent(), cases.WARM);
});

given('chat', 'runTools()', async (url) => {
  for (const stream of [false, true]) {
    const messages = [ask(cases.HOW_WARM)];
    const runner = client(url).chat.completions.runTools({ model: MODEL, messages, tools: [STRICT], stream });
    assert.equal(await runner.finalContent(), cases.WARM);
  }
});

given('completions', 'plain', async (url) => {
  const made = await client(url).completions.create({ model: MODEL, prompt: cases.NAME_A_COLOUR });
  assert.equal(made.choices[0].text, cases.COLOUR);
});

given('responses', 'plain', async (url) => {
  const made = await client(url).responses.create({ model: MODEL, input: cases.NAME_A_COLOUR });
  assert.equal(made.output_text, cases.COLOUR);
});

given('responses', 'stream', async (url) => {
  const stream = client(url).responses.stream({ model: MODEL, input: cases.NAME_A_COLOUR });
  let text = '';
  for await (const event of stream) if (event.type === 'response.output_text.delta') text += event.delta;
  assert.equal(text, cases.COLOUR);
  assert.equal((await stream.finalResponse()).output_text, cases.COLOUR);
});

given('responses', 'tools', async (url) => {
  const input = [ask(cases.HOW_WARM)];
  const first = await client(url).responses.create({ model: MODEL, input, tools: [FLAT] });
  input.push(...first.output);
  for (const item of first.output.filter(({ type }) => type === 'function_call'))
    input.push({
      type: 'function_call_output',
      call_id: item.call_id,
      output: cases.weather(JSON.parse(item.arguments)),
    });
  const second = await client(url).responses.create({ model: MODEL, input, tools: [FLAT] });
  assert.equal(second.output_text, cases.WARM);
});

given('responses', 'reasoning', async (url) => {
  const input = [ask(cases.THINK_OF_A_COLOUR)];
  const first = await client(url).responses.create({ model: MODEL, input });
  const thought = first.output.find(({ type }) => type === 'reasoning');
  assert.equal(thought.content[0].text, cases.THOUGHT);
  input.push(...first.output, ask(cases.NAME_A_COLOUR));
  assert.equal((await client(url).responses.create({ model: MODEL, input })).output_text, cases.COLOUR);
});

given('responses', 'parse() of an object, appended', async (url) => {
  const input = [ask(cases.WHICH_CITY)];
  const text = { format: zodTextFormat(Place, 'place') };
  const first = await client(url).responses.parse({ model: MODEL, input, text });
  assert.deepEqual(first.output_parsed, { city: 'Paris' });
  input.push(...first.output, ask(cases.NAME_A_COLOUR));
  assert.equal((await client(url).responses.create({ model: MODEL, input })).output_text, cases.COLOUR);
});

await cases.main();
