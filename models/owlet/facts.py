"""Facts to plant and to ask for again: who has which code word, port, city, ...

Keys and values are made up per conversation from syllables, figures and two short word lists, so
that no answer can be learned by heart: it has to be found in what was read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_ONSETS = tuple("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w z".split())  # noqa: SIM905
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo", "ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "rk", "nd", "st"]
_ADJECTIVES = (
    "amber ancient bitter black blue brave bright broken calm clever cold copper crooked dark deep dusty early empty "
    "faint fair fast fierce flat frozen gentle giant golden grand green grey happy heavy hidden hollow honest huge icy "
    "iron keen kind late lazy light little lonely long loud lucky marble mild narrow noble odd old orange pale patient "
    "plain polite proud purple quick quiet rapid rare red rough round royal rusty sad salty secret sharp shy silent "
    "silver simple slow small smooth soft solid sour steep still strange strong sweet swift tall tame thin tiny warm "
    "weak white wide wild wise wooden yellow young"
)
_NOUNS = (
    "anchor apple arrow badger banner barrel basket bear bell bird boat book bottle bridge brook button cabin "
    "camel candle canyon castle cat cedar chair cherry circle cloud clover coat comet coral cradle crane crow "
    "crown daisy deer desert door dragon drum eagle engine falcon feather fern fiddle field fire fish flag flute "
    "forest fork fox frog garden gate glacier goat goose hammer harbor hare hawk hedge helmet heron hill horse "
    "island jacket jar kettle key kite knife ladder lake lamp lantern leaf lemon lion lizard maple meadow mirror "
    "moon mountain mouse needle nest oak ocean olive orchid otter owl panda paper pearl pebble pencil pepper "
    "piano pine planet plum pocket pond rabbit raven ribbon river robin rocket rope rose saddle sail salmon shell "
    "ship shovel snake sparrow spider spoon star stone stork sun table tiger torch tower train tree trout tulip "
    "turtle valley violin wagon whale wheel willow window wolf zebra "
)
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


def word(rng: random.Random, n_syllables: int | None = None) -> str:
    """A word nobody has read before, such as ``drounast``."""
    n = n_syllables or rng.choice((2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(n))


def digits(rng: random.Random, low: int, high: int) -> str:
    return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(rng.randint(low, high) - 1))


def _hexadecimal(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789abcdef") for _ in range(8))


_VALUES = {
    "code word": lambda r: r.choice((word(r), word(r), f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}", word(r).upper())),
    "password": lambda r: f"{word(r, 2)}-{digits(r, 2, 4)}",
    "secret number": lambda r: digits(r, 4, 7),
    "port": lambda r: digits(r, 4, 5),
    "room": lambda r: f"{r.choice('ABCDEFGH')}{digits(r, 3, 3)}",
    "city": lambda r: word(r, 2).capitalize(),
    "owner": lambda r: f"{word(r, 2).capitalize()} {word(r, 2).capitalize()}",
    "colour": lambda r: f"{r.choice(ADJECTIVES)} {r.choice(('red', 'green', 'blue', 'yellow', 'white', 'violet'))}",
    "animal": lambda r: f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}",
    "file": lambda r: f"/srv/{word(r, 2)}/{word(r, 2)}.{r.choice(('txt', 'py', 'json', 'log'))}",
    "version": lambda r: f"{digits(r, 1, 1)}.{digits(r, 1, 2)}.{digits(r, 1, 2)}",
    "checksum": _hexadecimal,
}
ATTRIBUTES = tuple(_VALUES)


@dataclass(frozen=True, slots=True)
class Fact:
    key: str
    attribute: str
    value: str

    def statement(self, rng: random.Random) -> str:
        k, a, v = self.key, self.attribute, self.value
        return rng.choice(
            (
                f"The {a} of {k} is {v}.",
                f"The {a} of {k} is {v}.",
                f"Remember: the {a} of {k} is {v}.",
                f"Note that the {a} of {k} is {v}.",
                f"{k}: {a} = {v}",
                f"For {k}, use the {a} {v}.",
            )
        )

    def question(self, rng: random.Random) -> tuple[str, str]:
        """(question, answer); the question alone decides the form of the answer."""
        k, a, v = self.key, self.attribute, self.value
        if rng.random() < 0.15:
            return f"In one sentence: what is the {a} of {k}?", f"The {a} of {k} is {v}."
        return rng.choice(
            (
                f"What is the {a} of {k}?",
                f"What is the {a} of {k}?",
                f"What was the {a} of {k}?",
                f"Tell me the {a} of {k}.",
                f"Which {a} belongs to {k}?",
            )
        ), v


def key(rng: random.Random) -> str:
    return rng.choice(
        (
            lambda: f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
            lambda: f"project {word(rng, 2).capitalize()}",
            lambda: word(rng, 2).capitalize(),
            lambda: f"{rng.choice(('job', 'node', 'box', 'team'))}-{digits(rng, 2, 4)}",
        )
    )()


class Facts:
    """Facts of one conversation: no two have the same key and attribute."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.known: dict[tuple[str, str], Fact] = {}
        self.unasked: list[tuple[str, str]] = []

    def new(self) -> Fact:
        """A fact not yet known; one in three is about a key that already has another one."""
        rng = self.rng
        while True:
            reuse = self.known and rng.random() < 0.33
            name = rng.choice(list(self.known))[0] if reuse else key(rng)
            attribute = rng.choice(ATTRIBUTES)
            if (name, attribute) not in self.known:
                fact = Fact(name, attribute, _VALUES[attribute](rng))
                self.known[name, attribute] = fact
                self.unasked.append((name, attribute))
                return fact

    def changed(self) -> Fact:
        """A known fact with a new value; the old one no longer holds."""
        old = self.rng.choice(list(self.known.values()))
        fact = Fact(old.key, old.attribute, _VALUES[old.attribute](self.rng))
        self.known[old.key, old.attribute] = fact
        return fact

    def to_ask(self) -> Fact:
        """A known fact, almost always one that was not asked for before."""
        if self.unasked and self.rng.random() < 0.95:
            return self.known[self.unasked.pop(self.rng.randrange(len(self.unasked)))]
        return self.rng.choice(list(self.known.values()))
