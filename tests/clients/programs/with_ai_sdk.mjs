// The AI SDK, with the provider for OpenAI (by both APIs), the one for servers like it, and Anthropic's.
import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import * as cases from './cases.mjs';

const { MODEL, given } = cases;
const KINDS = {
  responses: (baseURL) => createOpenAI({ baseURL, apiKey: 'none' })(MODEL),
  chat: (baseURL) => createOpenAI({ baseURL, apiKey: 'none' }).chat(MODEL),
  'chat (compatible)': (baseURL) =>
    createOpenAICompatible({ name: 'local', baseURL, includeUsage: true, supportsStructuredOutputs: true })(MODEL),
  messages: (baseURL) => createAnthropic({ baseURL, apiKey: 'none' })(MODEL),
};
const weather = tool({
  description: 'How warm it is',
  inputSchema: z.object({ city: z.string() }),
  execute: cases.weather,
});

async function told(stream) {
  let text = '';
  for await (const part of stream.textStream) text += part;
  return text;
}

for (const [api, of] of Object.entries(KINDS)) {
  const asked = (url, prompt) => ({ model: of(url), prompt, maxRetries: 0, onError: () => {} });

  given(api, 'plain', async (url) => {
    assert.equal((await generateText(asked(url, cases.NAME_A_COLOUR))).text, cases.COLOUR);
  });

  given(api, 'stream', async (url) => {
    const stream = streamText(asked(url, cases.NAME_A_COLOUR));
    assert.equal(await told(stream), cases.COLOUR);
    assert.ok((await stream.usage).outputTokens > 0);
  });

  given(api, 'tools', async (url) => {
    const more = { ...asked(url, cases.HOW_WARM), tools: { weather }, stopWhen: stepCountIs(3) };
    const whole = await generateText(more);
    assert.equal(whole.text, cases.WARM);
    assert.equal(await told(streamText(more)), cases.WARM);
    const messages = [
      { role: 'user', content: cases.HOW_WARM },
      ...whole.response.messages,
      { role: 'user', content: cases.NAME_A_COLOUR },
    ];
    const { prompt: _, ...rest } = more;
    assert.equal((await generateText({ ...rest, messages })).text, cases.COLOUR);
  });

  if (api !== 'chat')
    given(api, 'reasoning', async (url) => {
      // It reads summaries, and asks for them if it is told that the model reasons.
      const providerOptions = { openai: { reasoningSummary: 'auto', forceReasoning: true } };
      const made = await generateText({ ...asked(url, cases.THINK_OF_A_COLOUR), providerOptions });
      assert.equal(made.reasoningText, cases.THOUGHT);
      const stream = streamText({ ...asked(url, cases.THINK_OF_A_COLOUR), providerOptions });
      await told(stream);
      assert.equal(await stream.reasoningText, cases.THOUGHT);
    });

  given(api, 'an object', async (url) => {
    const output = Output.object({ schema: z.object({ city: z.string() }) });
    const made = await generateText({ ...asked(url, cases.WHICH_CITY), output });
    assert.deepEqual(made.output, { city: 'Paris' });
  });
}

await cases.main();
