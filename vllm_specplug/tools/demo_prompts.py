"""The built-in questions of ``specplug demo``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One question: its kind, a short label for the table, and the text."""

    kind: str
    label: str
    text: str


_LIGHTHOUSE = (
    "The lighthouse on Gull Point was built in 1871, after three ships had been lost on the reef in a single winter. "
    "Its lamp first burned whale oil, later paraffin, and since 1934 it has run on electricity from the village. "
    "For ninety years a keeper and his family lived in the cottage beside the tower, growing vegetables behind a stone "
    "wall that kept out the wind. The last keeper left in 1962, when the light became automatic. The cottage stood "
    "empty until a group of neighbours repaired the roof and opened a small museum in it. Today about four thousand "
    "visitors a year climb the 118 steps to see the lamp, and their tickets pay for the upkeep of the tower."
)
_HONEY_BEES = (
    "Honey bees tell each other where to find food by dancing. A forager that has found flowers returns to the hive "
    "and runs in a short straight line while shaking her body, then circles back and repeats the run. The angle of the "
    "line shows the direction of the flowers relative to the sun, and the length of the run shows how far away they "
    "are. Other bees follow the dancer closely in the dark hive and feel her movements with their antennae. Karl "
    "von Frisch, who deciphered the dance, also found that bees correct the angle as the sun moves across the sky, "
    "even while they are inside the hive. Colonies whose dances are disturbed collect less food when flowers are rare."
)
_MEETING = (
    "The town council met on Tuesday to discuss the old railway bridge. The engineer reported that two of the six "
    "pillars are badly worn and that repairs would cost 340,000 dollars. Mrs Alvarez asked whether the bridge could "
    "be closed to lorries instead, and the engineer answered that this would buy about five years. Mr Chen said that "
    "the farmers east of the river need the bridge at harvest time and proposed to share the cost with the county. "
    "The council agreed to close the bridge to lorries from the first of November, to allow tractors until then, and "
    "to ask the county for half of the repair money before the next meeting on the ninth of January."
)

PROMPTS = (
    Prompt("chat", "introduce yourself", "Hello! Who are you, and what can you help me with?"),
    Prompt("chat", "good sleep", "I often wake up tired. Give me five simple habits that help people sleep better."),
    Prompt("chat", "blue sky", "Why is the sky blue during the day and red at sunset? Explain it to a child."),
    Prompt("code", "is prime", "Write a Python function is_prime(n) that returns True if n is prime, and explain it."),
    Prompt(
        "code",
        "reverse words",
        "Write a Python function that reverses the order of the words in a sentence. Show two examples.",
    ),
    Prompt(
        "code",
        "SQL query",
        "Write an SQL query that lists the ten customers with the highest total order value. Explain each part.",
    ),
    Prompt(
        "maths",
        "apples",
        "Tom has 24 apples. He gives a third of them to Anna and then buys 9 more. "
        "How many apples does he have now? Think step by step.",
    ),
    Prompt(
        "maths",
        "train",
        "A train travels 180 kilometres in 2 hours and then 150 kilometres in 3 hours. "
        "What is its average speed? Show each step.",
    ),
    Prompt(
        "maths",
        "rectangle",
        "A rectangle is twice as long as it is wide and its perimeter is 36 centimetres. Find its area, step by step.",
    ),
    Prompt("summarise", "lighthouse", f"Summarise this text in three sentences:\n\n{_LIGHTHOUSE}"),
    Prompt("summarise", "honey bees", f"Summarise the main points of this text as a short list:\n\n{_HONEY_BEES}"),
    Prompt("summarise", "council meeting", f"Summarise what was decided in this report:\n\n{_MEETING}"),
)
WARM_UP = "Write a short story about a dog that learns to swim."
