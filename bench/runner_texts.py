"""What the runners read: a text that was written for this, and prompts of a few words."""

from collections.abc import Iterator
from itertools import islice, product

TEXT = """\
The ferry to the island leaves at six in the morning, and nobody who lives there thinks that this is early.
By half past five the bakers have been at work for three hours, the schoolchildren stand in a row along the
wall with their bags between their feet, and the doctor, who crosses twice a week, is asleep on the bench
beside the ticket office. The woman who sells the tickets knows all of them by name. She knows as well who
is late, and when she sees a lamp move on the hill she holds the boat for another minute, which the captain
notes in his book as fog.

There was a plan, some years ago, to build a bridge. An engineer came from the capital with two assistants
and a drawing as long as a bed. He explained that the crossing would take four minutes instead of fifty,
that it would cost less than the ferry after twenty years, and that the wind, which everybody mentioned, had
been taken into account. The people listened and asked what would become of the boat. Nobody had thought
about the boat. It was older than the school, it had carried brides and coffins, a piano, forty sheep, and
once, in a single summer, every stone of the new church. The engineer went home. The drawing hangs in the
town hall, above the radiator, and is slowly turning yellow.

What a bridge would have changed is hard to say. Visitors would come in larger numbers, and some of them
would stay. The bakery would bake more bread, or buy it from the mainland, which is cheaper. A house by the
water would be worth three times what it is worth now, and so it would belong to somebody else. The doctor
says that two patients in his time would have lived if an ambulance had reached them sooner; he says it
without blame, as a number that has to be in the calculation. The captain says nothing, but he has taught
his daughter to steer.

In winter the crossing is often cancelled. Then the island is as quiet as a room in which somebody is
reading. The shop sells what it has. Letters wait in their sack on the other side, and the teacher, who
lives on the mainland, sends the lessons over the radio, slowly, so that the children can write them down.
When the boat comes again after a week, there is a small crowd on the pier, and for some minutes everyone
talks at the same time. Then they carry the boxes up the hill, one after another, and the day begins.

How does it work, to run a boat for eighty years? The answer is in the engine room, where nothing is
original any more. The first engine burned coal. The second, from a fishing vessel, burned whatever it was
given. The present one was chosen because a man on the island could repair it, and when he grew old he wrote
down, in a notebook with a green cover, every sound that it makes and what the sound means: a knock at low
speed is the third valve; a whistle is only the wind; a silence is the pump, and there are about ten
minutes. The notebook has been copied twice. If a part cannot be bought, it is made. In this way the boat
has outlived the companies that built it, and the rules under which it was built, and most of the reasons
that were given against it.
"""

_BEGINNINGS = (
    "The best thing about {} is",
    "Question: what is {}?\nAnswer:",
    "In the year 1900 {} was",
    "A short history of {}:",
    "My grandmother never liked {}, because",
    "Three facts about {}. First,",
    "def count_{}(",
    "Dear editor, I write to you about {}",
    "{} and",
    "Nobody knew who had brought {} to the",
)
_THINGS = (
    "the sea", "bread", "gravity", "music", "winter", "a bridge", "chess", "coffee", "the moon", "paper",
    "a lighthouse", "bees", "iron", "the railway", "salt", "maps", "glass", "tea", "a clock", "the garden",
)  # fmt: skip


def prompts(count: int) -> Iterator[str]:
    """The first `count` of 200."""
    yield from (beginning.format(thing) for beginning, thing in islice(product(_BEGINNINGS, _THINGS), count))
