// LibreChat's agents, which are what its server asks with, by both APIs.
import assert from 'node:assert/strict';
import { HumanMessage } from '@langchain/core/messages';
import { tool } from '@langchain/core/tools';
import { Providers, Run } from '@librechat/agents';
import * as c from './cases.mjs';

const weather = tool(c.weather, { name: 'weather', description: 'How warm it is.', schema: c.PARAMETERS });

async function ask(url, useResponsesApi, text) {
  const run = await Run.create({
    runId: crypto.randomUUID(),
    returnContent: true,
    graphConfig: {
      type: 'standard',
      instructions: 'Be brief.',
      tools: [weather],
      llmConfig: {
        provider: Providers.OPENAI,
        model: c.MODEL,
        apiKey: 'none',
        configuration: { baseURL: url },
        streaming: true,
        useResponsesApi,
      },
    },
  });
  const config = { runId: crypto.randomUUID(), streamMode: 'values', version: 'v2', configurable: { thread_id: '1' } };
  const parts = await run.processStream({ messages: [new HumanMessage(text)] }, config);
  const of = (type) => parts.filter((part) => part.type === type);
  return {
    text: of('text').map((part) => part.text).join(''),
    thoughts: [...of('think'), ...of('reasoning')].map((part) => part.think ?? part.reasoning),
    results: of('tool_call').map((part) => part.tool_call.output),
  };
}

for (const [api, responses] of [['chat', false], ['responses', true]]) {
  c.given(api, 'stream', async (url) => {
    assert.equal((await ask(url, responses, c.NAME_A_COLOUR)).text, c.COLOUR);
  });
  c.given(api, 'tools', async (url) => {
    const { text, results } = await ask(url, responses, c.HOW_WARM);
    assert.deepEqual([text, results], [c.WARM, ['21 degrees in Paris']]);
  });
  c.given(api, 'reasoning', async (url) => {
    const { text, thoughts } = await ask(url, responses, c.THINK_OF_A_COLOUR);
    assert.deepEqual([text, thoughts], [c.COLOUR, [c.THOUGHT]]);
  });
}

await c.main();
