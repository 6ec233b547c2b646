"""Which texts fit a query, by their words."""

import math
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """In lower case, in order."""
    return _WORD.findall(text.lower())


def ranked(query: str, texts: Sequence[Counter[str]]) -> list[int]:
    """The texts that hold a word of the query, best first, each given by the counts of its words: BM25 (Robertson and Zaragoza
    2009), k1 = 1.2, b = 0.75."""
    sizes = [sum(words.values()) for words in texts]
    mean = sum(sizes) / max(1, len(sizes))
    scores = [0.0] * len(texts)
    for word in dict.fromkeys(words_of(query)):
        holding = [i for i, words in enumerate(texts) if word in words]
        rarity = math.log(1 + (len(texts) - len(holding) + 0.5) / (len(holding) + 0.5))
        for i in holding:
            often = texts[i][word]
            scores[i] += rarity * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * sizes[i] / mean))
    return sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])
