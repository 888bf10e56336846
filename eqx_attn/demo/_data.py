"""English text that ships with Python, as bytes in packed rows: several documents in a row, told apart by ids."""

import dataclasses
import pydoc_data.topics

import numpy as np

VOCABULARY = 256
START = 0
"""The byte that begins each document; it does not occur in text."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of documents: tokens and segment ids, both `[rows, length]`. Ids count from 1 in each row; 0 is padding."""

    tokens: np.ndarray
    segment_ids: np.ndarray

    def batch(self, rows) -> "Packed":
        """The rows with these numbers."""
        return Packed(self.tokens[rows], self.segment_ids[rows])


def load(length: int, validation_part: float = 0.1, validation_rows: int = 32, seed: int = 0) -> tuple[Packed, Packed]:
    """Training and validation rows of `length` bytes, from the help texts of Python (`pydoc_data.topics`).

    Topics are divided, so that the validation text is about other things, of which at most `validation_rows` rows are
    kept. Many paragraphs stand in several topics: each is used once, so that none is in both parts.
    """
    topics = pydoc_data.topics.topics
    random = np.random.default_rng(seed)
    names = random.permutation(sorted(topics))
    wanted = validation_part * sum(map(len, topics.values()))
    seen: set[str] = set()
    parts: dict[str, list[bytes]] = {"validation": [], "train": []}
    for name in names:
        part = "validation" if sum(map(len, parts["validation"])) < wanted else "train"
        parts[part] += documents(topics[name], seen, longest=length // 2)
    validation = pack(parts["validation"], length)
    kept = random.permutation(len(validation.tokens))[:validation_rows]
    return pack(parts["train"], length), validation.batch(kept)


def documents(text: str, seen: set[str], longest: int) -> list[bytes]:
    """Runs of new paragraphs of `text`, each at most `longest` bytes with its `START`. Adds them to `seen`."""
    found = [b""]
    for paragraph in text.split("\n\n"):
        if paragraph.strip() and paragraph not in seen:
            seen.add(paragraph)
            piece = paragraph.encode() + b"\n\n"
            if found[-1] and len(found[-1]) + len(piece) >= longest:
                found.append(b"")
            found[-1] += piece
    starts = [(document, i) for document in found for i in range(0, len(document), longest - 1)]
    return [bytes([START]) + document[i : i + longest - 1] for document, i in starts]


def pack(documents: list[bytes], length: int) -> Packed:
    """First fit, longest documents first: each goes into the first row that has room for it."""
    rows: list[list[bytes]] = []
    room = np.full(len(documents), length)  # there is always a row that is still empty
    for document in sorted(documents, key=len, reverse=True):
        row = int(np.argmax(room >= len(document)))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        room[row] -= len(document)
    packed = Packed(np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32))
    for row, inside in enumerate(rows):
        content = b"".join(inside)
        packed.tokens[row, : len(content)] = np.frombuffer(content, np.uint8)
        packed.segment_ids[row, : len(content)] = np.repeat(np.arange(len(inside)) + 1, [len(d) for d in inside])
    return packed


def is_target(segment_ids):
    """Of `[..., length]` ids, which of the tokens from the second on continue the document of the one before."""
    return (segment_ids[..., 1:] == segment_ids[..., :-1]) & (segment_ids[..., 1:] > 0)


def unigram_loss(train: Packed, validation: Packed) -> float:
    """Nats per byte on `validation` of a model that knows only how frequent each byte is in `train`."""
    counts = np.bincount(train.tokens[:, 1:][is_target(train.segment_ids)], minlength=VOCABULARY) + 1
    log_frequency = np.log(counts / counts.sum())
    return float(-log_frequency[validation.tokens[:, 1:][is_target(validation.segment_ids)]].mean())
