// Ollama's own client for JavaScript.
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';
import * as cases from './cases.mjs';

const { MODEL: model, given } = cases;
const client = (url) => new Ollama({ host: url.replace(/\/v1$/, '') });
const ask = (content) => [{ role: 'user', content }];
const tools = [{ type: 'function', function: { name: 'weather', description: 'How warm', parameters: cases.PARAMETERS } }];

given('ollama', 'plain', async (url) => {
  const made = await client(url).chat({ model, messages: ask(cases.NAME_A_COLOUR) });
  assert.equal(made.message.content, cases.COLOUR);
});

given('ollama', 'stream', async (url) => {
  let text = '';
  for await (const part of await client(url).chat({ model, messages: ask(cases.NAME_A_COLOUR), stream: true }))
    text += part.message.content;
  assert.equal(text, cases.COLOUR);
});

given('ollama', 'tools', async (url) => {
  const messages = ask(cases.HOW_WARM);
  const called = (await client(url).chat({ model, messages, tools })).message;
  const [call] = called.tool_calls;
  const content = cases.weather(call.function.arguments);
  messages.push(called, { role: 'tool', tool_name: call.function.name, content });
  assert.equal((await client(url).chat({ model, messages, tools })).message.content, cases.WARM);
});

given('ollama', 'reasoning', async (url) => {
  const { message } = await client(url).chat({ model, messages: ask(cases.THINK_OF_A_COLOUR), think: true });
  assert.deepEqual([message.thinking, message.content], [cases.THOUGHT, cases.COLOUR]);
});

given('ollama', 'a prompt', async (url) => {
  assert.equal((await client(url).generate({ model, prompt: cases.NAME_A_COLOUR })).response, cases.COLOUR);
});

given('ollama', 'models', async (url) => {
  assert.deepEqual((await client(url).list()).models.map((one) => one.model), [`${model}:latest`]);
});

await cases.main();
