// What tests/clients/cases.py is to programs in Python: cases, run one after another, each told in a line of JSON.
export const MODEL = 'scripted';
export const NAME_A_COLOUR = 'Name a colour.';
export const COLOUR = 'Blue.';
export const THINK_OF_A_COLOUR = 'Think of a colour.';
export const THOUGHT = 'The sky has one.';
export const HOW_WARM = 'How warm is it in Paris?';
export const WARM = 'It has 21 degrees.';
export const WHICH_CITY = 'Which city is it?';

export const weather = ({ city }) => `21 degrees in ${city}`;
export const PARAMETERS = {
  type: 'object',
  properties: { city: { type: 'string' } },
  required: ['city'],
  additionalProperties: false,
};

const found = [];

export const given = (api, what, run) => found.push({ api, what, run });

export async function main() {
  for (const { api, what, run } of found) {
    let failed = null;
    try {
      await run(process.argv[2]);
    } catch (error) {
      failed = `${error.name}: ${error.message}`.slice(0, 300);
      console.error(error);
    }
    // Some clients print, and do not end their line.
    console.log(`\n${JSON.stringify({ api, what, failed })}`);
  }
}
