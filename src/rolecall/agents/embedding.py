"""Which texts are near a query, by the embeddings of a sentence-transformers model."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rolecall.errors import UserError


def by_embedding(name: str) -> Callable[[str, Sequence[str]], list[int]]:
    """(query, texts) -> all texts, the nearest first by the cosine. `name` is a model's directory, or its name on the hub."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UserError(
            f"lessons.recall {name!r} needs sentence-transformers: pip install 'rolecall[lessons]', or use bm25"
        ) from error
    try:
        model = SentenceTransformer(name, device="cpu")
    except Exception as error:
        raise UserError(
            f"lessons.recall {name!r} is neither bm25 nor a sentence-transformers model: {error}"
        ) from error

    @cache  # one at a time, so that no vector depends on what else is asked about
    def vector(text: str) -> Any:
        return model.encode([text], normalize_embeddings=True, show_progress_bar=False)[0]

    def nearest(query: str, texts: Sequence[str]) -> list[int]:
        near = [float(vector(query) @ vector(text)) for text in texts]
        return sorted(range(len(texts)), key=lambda i: -near[i])

    return nearest
