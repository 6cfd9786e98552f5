"""The text that the demo learns: little stories, generated, the same on every machine.

A few hundred kilobytes of plain sentences about people, animals, places and what they do. Names,
numbers and places are kept up within a story, so that it pays to look back; words recur, so that it
pays to remember what follows what.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

PEOPLE = ("Ada", "Boris", "Clara", "Dmitri", "Edith", "Felix", "Greta", "Hugo", "Irma", "Jonas")
ANIMALS = ("heron", "badger", "otter", "magpie", "hedgehog", "donkey", "lizard", "squirrel")
PLACES = ("harbour", "orchard", "lighthouse", "market", "quarry", "library", "station", "meadow")
THINGS = ("lantern", "kettle", "violin", "compass", "ladder", "blanket", "telescope", "barrel")
MOODS = ("quietly", "at once", "with great care", "without a word", "for the second time")
WEATHER = (
    "It was raining.",
    "The wind had turned.",
    "There was fog over the water.",
    "It was hot.",
)
COLOURS = ("green", "yellow", "grey", "crimson", "pale blue")
NUMBERS = ("two", "three", "four", "five", "six", "seven")

SENTENCES = (
    "{a} carried the {thing} to the {place}.",
    "The {animal} followed {a} {mood}.",
    "{weather} {a} waited at the {place} for {b}.",
    '"Where is the {thing}?" asked {b}.',
    '"I left it at the {place}," said {a}.',
    "{b} counted {number} {colour} boats near the {place}.",
    "In the morning the {animal} was gone, and so was the {thing}.",
    "{a} and {b} looked for the {animal} {mood}.",
    "Nobody at the {place} had seen the {colour} {thing}.",
    "{b} gave {a} {number} coins for the {thing}.",
    "Then the {animal} came back to the {place} {mood}.",
    "{a} painted the {thing} {colour} and went home.",
)


def story(draw: random.Random) -> str:
    """One story: two people, an animal, a thing and two places, all through."""
    a, b = draw.sample(PEOPLE, 2)
    near, far = draw.sample(PLACES, 2)
    fixed = {
        "a": a, "b": b, "animal": draw.choice(ANIMALS), "thing": draw.choice(THINGS),
        "colour": draw.choice(COLOURS), "number": draw.choice(NUMBERS),
    }  # fmt: skip
    told = []
    for sentence in draw.sample(SENTENCES, draw.randint(5, 8)):
        place = near if draw.random() < 0.7 else far
        told.append(
            sentence.format(
                **fixed, place=place, mood=draw.choice(MOODS), weather=draw.choice(WEATHER)
            )
        )
    return " ".join(told)


def corpus(characters: int = 400_000, seed: int = 0) -> str:
    """Stories, one per line, about this many characters."""
    draw = random.Random(seed)  # noqa: S311 - stories, not secrets
    lines: list[str] = []
    length = 0
    while length < characters:
        lines.append(story(draw))
        length += len(lines[-1]) + 1
    return "\n".join(lines) + "\n"


class Text:
    """Characters as numbers: the first nine tenths to learn from, the rest to test with."""

    def __init__(self, characters: int = 400_000, seed: int = 0) -> None:
        text = corpus(characters, seed)
        self.letters = sorted(set(text))
        self.number = {letter: i for i, letter in enumerate(self.letters)}
        ids = torch.tensor([self.number[letter] for letter in text])
        cut = len(ids) * 9 // 10
        self.train, self.test = ids[:cut], ids[cut:]

    def encode(self, text: str) -> Tensor:
        """int64 `[length]`."""
        return torch.tensor([self.number[letter] for letter in text])

    def decode(self, ids: Tensor) -> str:
        """The letters of int64 `[length]`."""
        return "".join(self.letters[i] for i in ids.tolist())

    def batch(self, step: int, seed: int, rows: int, length: int) -> Tensor:
        """int64 `[rows, length + 1]` of the training text; the same for the same step and seed."""
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - length - 1, (rows,), generator=draw)
        return torch.stack([self.train[i : i + length + 1] for i in starts.tolist()])

    def unigram_entropy(self) -> float:
        """The loss, in nats, of knowing only how frequent each letter is."""
        share = torch.bincount(self.train).double() / len(self.train)
        return float(-(share * share.log()).sum())
