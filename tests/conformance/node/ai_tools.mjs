// A tool loop through the AI SDK, whole and streamed: node ai_tools.mjs BASE_URL MODEL prints one JSON object.
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(2);
const weather = tool({
  description: 'How warm it is',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `21 degrees in ${city}`,
});
const asked = {
  model: createOpenAI({ baseURL, apiKey: 'none' })(name),
  prompt: 'How warm is it in Paris?',
  tools: { weather },
  stopWhen: stepCountIs(3),
  maxRetries: 0,
};
const calls = (steps) => steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));

const whole = await generateText(asked);
const stream = streamText(asked);
let text = '';
for await (const part of stream.textStream) text += part;
console.log(JSON.stringify({
  whole: { text: whole.text, calls: calls(whole.steps), finish: whole.finishReason },
  streamed: { text, calls: calls(await stream.steps), finish: await stream.finishReason },
}));
