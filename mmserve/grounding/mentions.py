"""Which objects a text names, and what it says of them: that they are there, that they aren't, or only that they were said or asked for.

Words and clauses of English, no parser: negation reaches forward as in NegEx (Chapman et al., "A simple algorithm for identifying negated
findings and diseases in discharge summaries", 2001), a "no" less far than a "not".  Linear in the text, whatever it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from mmserve.grounding.vocabulary import WORD, Terms, Vocabulary, normal, words_of


class Stance(Enum):
    ASSERTED = "asserted"  # it is there
    NEGATED = "negated"  # it isn't
    HEARD = "heard"  # somebody said the word, or made the sound: nothing that can be seen
    ASKED = "asked"


@dataclass(frozen=True, slots=True)
class Mention:
    """`text[start:stop]` names an object of the vocabulary."""

    name: str  # the object, as the vocabulary calls it
    start: int
    stop: int
    stance: Stance


class _Cue(Enum):
    NO = 1  # denies what follows it, until a new noun phrase is listed: "no dog, a cat"
    NOT = 2  # denies what follows it, until a new clause begins: "I don't see a dog, a cat or a fish, but ..."
    BUT = 3  # ends either
    ABSENT = 4  # denies what its clause has named
    HEAR = 5  # what follows can't be seen
    SEE = 6  # what follows can
    NOTHING = 7  # looks like one of them and isn't


_CUES: dict[_Cue, tuple[str, ...]] = {
    _Cue.NO: ("no", "zero", "0", "neither", "without", "lacking", "lacks", "lack", "free of", "absence of", "instead of", "rather than"),
    _Cue.NOT: ("not", "never", "none", "nothing", "whether", "if", "no longer"),
    _Cue.BUT: (
        "but", "however", "though", "although", "except", "yet", "while", "whereas", "only", "just", "instead",
        "nothing but", "none other than",
    ),
    _Cue.ABSENT: (
        "not there", "not visible", "not present", "not shown", "not seen", "not be seen", "not to be seen", "not found", "not here",
        "not in the picture", "not in the image", "not in the photo", "not in the scene", "is absent", "are absent", "is missing",
        "are missing", "nowhere",
    ),
    _Cue.HEAR: (
        "hear", "hears", "heard", "hearing", "say", "says", "said", "saying", "spoken", "speaks", "word", "words", "voice", "sound",
        "sounds", "clip", "audio", "recording", "text reads", "sign reads", "caption reads", "written", "labeled", "labelled",
    ),
    _Cue.SEE: ("see", "sees", "seen", "picture", "pictures", "image", "images", "photo", "photos", "show", "shows", "shown", "visible"),
    _Cue.NOTHING: (
        "not only", "not just", "no doubt", "no wonder", "no matter", "no fewer than", "no less than", "no more than", "as if",
        "would say", "i'd say", "in other words",
    ),
}  # fmt: skip
_OPENERS = frozenset(words_of("i you he she it we they there here this that these those"))  # of a new clause, behind a comma or an "and"
_DETERMINERS = frozenset(
    words_of("a an the one two three four five six seven eight nine ten some several many another his her its their my your our")
)
_IRREGULAR_NOTS = {"can't": ("can", "not"), "won't": ("will", "not"), "shan't": ("shall", "not"), "cannot": ("can", "not")}
_TOKEN = re.compile(
    rf"(?P<word>{WORD})|(?P<end>(?<!\d)[.]|[.](?!\d)|[!?;])|(?P<pause>[,:\n()\u2013\u2014])|(?P<joint>(?<=[^\W_])[-_](?=[^\W_]))"
)


def _cue_terms() -> Terms[_Cue]:
    terms: Terms[_Cue] = Terms()
    for cue, phrases in _CUES.items():
        for phrase in phrases:
            terms.add(words_of(phrase), cue)
    return terms


_CUE_TERMS = _cue_terms()


@dataclass(slots=True)
class _Sentence:
    """Its words in normal form, where they stand, and what is before each: a comma, a hyphen or underscore, or nothing."""

    words: list[str]
    places: list[tuple[int, int]]
    after_pause: list[bool]
    after_joint: list[bool]
    is_question: bool = False

    def add(self, word: str, place: tuple[int, int], *, pause: bool, joint: bool) -> None:
        self.words.append(word)
        self.places.append(place)
        self.after_pause.append(pause)
        self.after_joint.append(joint)


def find_mentions(text: str, vocabulary: Vocabulary) -> tuple[Mention, ...]:
    """In the order of the text."""
    found: list[Mention] = []
    for sentence in _sentences(text):
        found += _read(sentence, vocabulary)
    return tuple(found)


def _sentences(text: str) -> list[_Sentence]:
    sentences = [_Sentence([], [], [], [])]
    pause = joint = False
    for token in _TOKEN.finditer(text):
        sentence = sentences[-1]
        match token.lastgroup:
            case "word":
                for i, word in enumerate(_expanded(token.group())):
                    sentence.add(word, token.span(), pause=pause and i == 0, joint=joint and i == 0)
                pause = joint = False
            case "end":
                if sentence.words:
                    sentence.is_question = token.group() == "?"
                    sentences.append(_Sentence([], [], [], []))
                pause = joint = False
            case "pause":
                pause = True
            case _:
                joint = True
    return sentences


def _expanded(written: str) -> tuple[str, ...]:
    """A word in normal form, or the two that are contracted in it: doesn't is does not."""
    word = normal(written)
    if word in _IRREGULAR_NOTS:
        return _IRREGULAR_NOTS[word]
    return (word.removesuffix("n't"), "not") if word.endswith("n't") else (word,)


def _read(sentence: _Sentence, vocabulary: Vocabulary) -> list[Mention]:
    words, found = sentence.words, list[Mention]()
    denial: _Cue | None = None
    is_heard = False
    first_of_clause = 0  # in `found`
    index = 0
    while index < len(words):
        if _is_break(sentence, index):
            if _opens_clause(words, index):
                denial, first_of_clause = None, len(found)
            elif denial is _Cue.NO and _begins_noun(words, index):
                denial = None
        named = vocabulary.match(words, index)
        cue = _CUE_TERMS.longest(words, index) if named is None else None
        if named is not None:
            length, name = named
            if name and not _is_joined(sentence, index, index + length):
                start, stop = sentence.places[index][0], sentence.places[index + length - 1][1]
                found.append(Mention(name, start, stop, _stance(denial, is_heard=is_heard, is_asked=sentence.is_question)))
            index += length
            continue
        if cue is not None:
            length, kind = cue
            if kind in (_Cue.NO, _Cue.NOT) and not _is_answer(sentence, index):
                denial = kind
            elif kind is _Cue.BUT:
                denial, first_of_clause = None, len(found)
            elif kind is _Cue.ABSENT:
                found[first_of_clause:] = [_denied(mention) for mention in found[first_of_clause:]]
                denial, first_of_clause = _Cue.NO, len(found)
            elif kind in (_Cue.HEAR, _Cue.SEE):
                is_heard = kind is _Cue.HEAR
            index += length
            continue
        index += 1
    return found


def _stance(denial: _Cue | None, *, is_heard: bool, is_asked: bool) -> Stance:
    if is_asked:
        return Stance.ASKED
    if denial is not None:
        return Stance.NEGATED
    return Stance.HEARD if is_heard else Stance.ASSERTED


def _denied(mention: Mention) -> Mention:
    return replace(mention, stance=Stance.NEGATED) if mention.stance is Stance.ASSERTED else mention


def _is_break(sentence: _Sentence, index: int) -> bool:
    """Whether a comma, a line's end or an "and" stands before this word."""
    return sentence.after_pause[index] or (index > 0 and sentence.words[index - 1] in ("and", "so", "because"))


def _opens_clause(words: list[str], index: int) -> bool:
    return words[index] in _OPENERS


def _begins_noun(words: list[str], index: int) -> bool:
    return words[index] in _DETERMINERS or words[index].isdecimal()


def _is_answer(sentence: _Sentence, index: int) -> bool:
    """The "no" of "No, I see a cat"."""
    is_last = index + 1 == len(sentence.words)
    return sentence.words[index] == "no" and index == 0 and (is_last or sentence.after_pause[index + 1])


def _is_joined(sentence: _Sentence, start: int, stop: int) -> bool:
    """Whether a hyphen makes it part of another word: dog-like."""
    return sentence.after_joint[start] or (stop < len(sentence.words) and sentence.after_joint[stop])
