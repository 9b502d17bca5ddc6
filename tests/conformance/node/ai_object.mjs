// An object of a schema through the AI SDK: node ai_object.mjs BASE_URL MODEL prints it.
import { createOpenAI } from '@ai-sdk/openai';
import { Output, generateText } from 'ai';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(2);
const made = await generateText({
  model: createOpenAI({ baseURL, apiKey: 'none' })(name),
  prompt: 'Where is it warm?',
  output: Output.object({ schema: z.object({ city: z.enum(['Paris', 'Rome']) }) }),
  maxRetries: 0,
});
console.log(JSON.stringify(made.output));
