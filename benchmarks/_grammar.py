"""Text drawn from a small probabilistic grammar: what a model can learn from it needs no download and is the same everywhere.

A document states who has what, goes on with sentences whose verbs agree with their subjects across relative clauses, and asks
now and then for one of the facts: the answer is somewhere before, so that a model without attention cannot know it.
"""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ["ada", "ben", "cleo", "dan", "eve", "finn", "gina", "hugo"]
COLOURS = ["red", "blue", "green", "white", "black", "yellow", "brown", "grey"]
THINGS = ["kite", "boat", "drum", "lamp", "ring", "coin", "book", "clock"]
#: (singular, plural)
NOUNS = [(n, n + "s") for n in ["dog", "cat", "bird", "farmer", "sailor", "doctor", "king", "tiger"]]
VERBS = [(v + "s", v) for v in ["see", "like", "help", "follow", "hear", "find", "call", "know"]]
ADJECTIVES = ["old", "young", "small", "tall", "happy", "quiet"]
GLUE = ["the", "a", "some", "that", "and", "has", "what", "?", ".", "<doc>"]

WORDS = [*GLUE, *NAMES, *COLOURS, *THINGS, *ADJECTIVES, *(w for pair in NOUNS + VERBS for w in pair)]
"""The vocabulary; a token is an index into it."""


class Grammar:
    """Draws documents; the same ``seed`` gives the same text."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def tokens(self, count: int) -> list[int]:
        """``count`` tokens of documents, one after the other."""
        index = {word: i for i, word in enumerate(WORDS)}
        out: list[int] = []
        while len(out) < count:
            out += [index[word] for word in self.document()]
        return out[:count]

    def document(self) -> list[str]:
        draw = self.random
        owners = draw.sample(NAMES, draw.randint(2, 5))
        facts = {name: [draw.choice(COLOURS), draw.choice(THINGS)] for name in owners}
        words = ["<doc>"]
        for name, has in facts.items():
            words += [name, "has", "the", *has, "."]
        for _ in range(draw.randint(4, 12)):
            if draw.random() < 0.3:
                name = draw.choice(owners)
                words += ["what", "has", name, "?", *facts[name], "."]
            else:
                words += self.sentence()
        return words

    def sentence(self) -> list[str]:
        number = self.random.randrange(2)
        return [*self.noun_phrase(number, 0), *self.verb_phrase(number, 0), "."]

    def noun_phrase(self, number: int, depth: int) -> list[str]:
        words = [self.random.choice(("the", ("a", "some")[number]))]
        if self.random.random() < 0.4:
            words.append(self.ranked(ADJECTIVES))
        words.append(self.ranked(NOUNS)[number])
        if depth < 2 and self.random.random() < 0.3:
            words += ["that", *self.verb_phrase(number, depth + 1)]
        return words

    def verb_phrase(self, number: int, depth: int) -> list[str]:
        words = [self.ranked(VERBS)[number]]
        if self.random.random() < 0.2:
            words += ["and", self.ranked(VERBS)[number]]
        return words + self.noun_phrase(self.random.randrange(2), depth + 1)

    def ranked(self, choices: list) -> Any:
        """One of them, the first ones more often, as words are in natural text."""
        return choices[int(len(choices) * self.random.random() ** 2)]
