"""From token ids to the rows of the tables: vocabulary, table sizes, multipliers, hashes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tile_kernels import engram as ops
from tile_kernels.torch.engram import make_offsets

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def normalized_text(text: str) -> str:
    """What a token says whatever its case, accents, width and blanks.

    Unicode's NFKC, no accents, lower case, runs of blanks as one space, none at the ends. A text
    that vanishes is left as it is, and so is one of broken bytes, which can say anything; of blanks
    alone one space is left.

    >>> normalized_text(" Été"), normalized_text("\\n  "), normalized_text("ﬁne")
    ('ete', ' ', 'fine')
    """
    if "\N{REPLACEMENT CHARACTER}" in text:
        return text
    parts = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(part for part in parts if unicodedata.category(part) != "Mn").lower()
    blank = re.sub(r"[ \t\r\n]+", " ", bare)
    return (blank if blank == " " else blank.strip()) or text


def compression_map(tokens: Sequence[str]) -> Tensor:
    """An id for each token, the same for tokens that say the same: int32 `[len(tokens)]`.

    `tokens[i]` is the text of token `i`. Texts that `normalized_text` makes equal share an id. Ids
    count up from 0 in the order in which texts appear first, so that their number is the size of
    the compressed vocabulary. Give two tokens of equal text that must stay apart (bytes that are
    not text, special tokens) texts of their own.

    >>> compression_map(["the", " The", "cat", "THE", " "]).tolist()
    [0, 0, 1, 0, 2]
    """
    ids: dict[str, int] = {}
    canonical = [ids.setdefault(normalized_text(token), len(ids)) for token in tokens]
    return torch.tensor(canonical, dtype=torch.int32, device="cpu")


def prime_table_sizes(
    num_layers: int, max_ngram_size: int, num_tables: int, table_rows: int | Sequence[int]
) -> Tensor:
    """Sizes of all tables: different primes, the next ones from `table_rows` on.

    Returns int32 `[num_layers, max_ngram_size - 1, num_tables]`. `table_rows` is one number for all
    orders of n-grams, or one for each order from 2 on. Two n-grams that collide in one table hardly
    ever do in another, since the sizes have no common divisor.

    >>> prime_table_sizes(2, 3, 2, [10, 100]).tolist()
    [[[11, 13], [101, 103]], [[17, 19], [107, 109]]]
    """
    orders = max_ngram_size - 1
    wanted = [table_rows] * orders if isinstance(table_rows, int) else list(table_rows)
    if len(wanted) != orders:
        raise ValueError(
            f"prime_table_sizes: table_rows must be one number or {orders}, one for each order "
            f"from 2 to {max_ngram_size}, got {len(wanted)}"
        )
    taken: set[int] = set()
    searches = {rows: _primes_from(rows, taken) for rows in wanted}
    sizes = [
        [[next(searches[rows]) for _ in range(num_tables)] for rows in wanted]
        for _ in range(num_layers)
    ]
    flat = torch.tensor(sizes, dtype=torch.int32, device="cpu")
    return flat.view(num_layers, orders, num_tables)


def _primes_from(start: int, taken: set[int]) -> Iterator[int]:
    """Primes not below `start` that are not taken; each is taken when it comes."""
    number = max(start, 2)
    while number <= _INT32_MAX:
        if number not in taken and all(number % d for d in range(2, int(number**0.5) + 1)):
            taken.add(number)
            yield number
        number += 1
    raise ValueError(f"prime_table_sizes: table_rows must leave primes below 2^31, got {start}")


def odd_multipliers(num_layers: int, max_ngram_size: int, vocab_size: int, seed: int) -> Tensor:
    """Random odd multipliers of the hash, `[num_layers, max_ngram_size]` int64.

    Each is `2 r + 1` with `r` uniform in `[0, (2^63 - 1) // vocab_size // 2)`, so below
    `2^63 / vocab_size`, and its product with any id below `vocab_size` fits in 63 bits. They depend
    on the seed and the layer, not on how many layers there are.

    >>> multipliers = odd_multipliers(2, 3, vocab_size=1000, seed=0)
    >>> bool((multipliers % 2 == 1).all() and (multipliers < 2**63 // 1000).all())
    True
    """
    if vocab_size < 1:
        raise ValueError(f"odd_multipliers: vocab_size must be at least 1, got {vocab_size}")
    bound = max(_INT64_MAX // vocab_size // 2, 1)
    layers = [
        torch.randint(
            bound, (max_ngram_size,), device="cpu",
            generator=torch.Generator("cpu").manual_seed(seed + 10007 * layer),
        )
        for layer in range(num_layers)
    ]  # fmt: skip
    return 2 * torch.stack(layers) + 1


class EngramHasher(nn.Module):
    """Rows of the tables for token ids, of all Engram layers of a model at once.

    | argument | meaning |
    |---|---|
    | `num_layers` | Engram layers of the model |
    | `vocab_size` | token ids are below it; ignored where there is a map |
    | `table_rows` | least rows of a table, one number or one for each order of n-grams |
    | `max_ngram_size`, `num_tables` | n-grams of 2 to that many tokens, tables for each order |
    | `pad_id` | token before the start of a document; ends a document inside of one |
    | `token_map` | `[V]` of `compression_map`, applied to ids and to `pad_id` |
    | `seed` | of the multipliers |

    `multipliers` `[L, N]`, `vocab_sizes` `[L, N - 1, E]`, `offsets` `[L, C]` and `token_map` are
    buffers and part of the state. Offsets are int64 if a layer has more than 2^31 rows.
    `rows_per_layer` are the rows that the tables of each layer have together.

    >>> hasher = EngramHasher(num_layers=2, vocab_size=50, table_rows=100, num_tables=4)
    >>> hasher(torch.tensor([[3, 1, 4], [1, 5, 9]])).shape
    torch.Size([2, 2, 3, 8])
    """

    multipliers: Tensor
    vocab_sizes: Tensor
    offsets: Tensor
    token_map: Tensor | None

    def __init__(
        self,
        num_layers: int,
        vocab_size: int,
        table_rows: int | Sequence[int],
        max_ngram_size: int = 3,
        num_tables: int = 8,
        pad_id: int = 0,
        token_map: Tensor | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, number, least in (
            ("num_layers", num_layers, 1),
            ("max_ngram_size", max_ngram_size, 2),
            ("num_tables", num_tables, 1),
        ):
            if number < least:
                raise ValueError(f"EngramHasher: {name} must be at least {least}, got {number}")
        self.max_ngram_size = max_ngram_size
        self.pad_id = pad_id
        if token_map is not None:
            vocab_size = int(token_map.max()) + 1
            if 0 <= pad_id < len(token_map):
                self.pad_id = int(token_map[pad_id])
        sizes = prime_table_sizes(num_layers, max_ngram_size, num_tables, table_rows)
        self.rows_per_layer = sizes.flatten(1).sum(1, dtype=torch.int64).tolist()
        wide = max(self.rows_per_layer, default=0) > 2**31
        self._register(
            odd_multipliers(num_layers, max_ngram_size, vocab_size, seed),
            sizes,
            make_offsets(sizes, torch.int64 if wide else torch.int32),
            token_map,
        )
        self.to(torch.get_default_device() if device is None else device)

    def _register(
        self, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor, token_map: Tensor | None
    ) -> None:
        self.register_buffer("multipliers", multipliers)
        self.register_buffer("vocab_sizes", vocab_sizes)
        self.register_buffer("offsets", offsets)
        self.register_buffer("token_map", token_map)

    @property
    def num_layers(self) -> int:
        """Engram layers of the model."""
        return self.multipliers.shape[0]

    @property
    def num_columns(self) -> int:
        """Tables of one layer, `(max_ngram_size - 1) * num_tables`."""
        return self.offsets.shape[1]

    def layer(self, layer: int) -> EngramHasher:
        """A hasher for one of the layers, with buffers of its own but for the token map."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"EngramHasher: layer must be 0..{self.num_layers - 1}, got {layer}")
        one = EngramHasher.__new__(EngramHasher)
        nn.Module.__init__(one)
        one.max_ngram_size, one.pad_id = self.max_ngram_size, self.pad_id
        one.rows_per_layer = self.rows_per_layer[layer : layer + 1]
        multipliers, vocab_sizes, offsets = (
            buffer[layer : layer + 1].clone()
            for buffer in (self.multipliers, self.vocab_sizes, self.offsets)
        )
        one._register(multipliers, vocab_sizes, offsets, self.token_map)
        return one

    def forward(self, token_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Token ids `[S]` or `[B, S]` to rows `[L, *token_ids.shape, C]`.

        `cu_seqlens` divides the tokens into documents, as in `tile_kernels.engram.ngram_windows`.
        Ids on another device than the buffers are hashed there, with copies of the buffers.
        """
        device = token_ids.device
        multipliers, vocab_sizes, offsets = (
            buffer.to(device) for buffer in (self.multipliers, self.vocab_sizes, self.offsets)
        )
        token_map = None if self.token_map is None else self.token_map.to(device)
        windows = ops.ngram_windows(
            token_ids.contiguous(), self.max_ngram_size, self.pad_id, cu_seqlens, token_map
        )
        rows = ops.engram_hash(windows.flatten(0, -2), multipliers, vocab_sizes, offsets)
        return rows.view(self.num_layers, *token_ids.shape, self.num_columns)

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        return (
            f"layers={self.num_layers}, max_ngram_size={self.max_ngram_size}, "
            f"tables={self.num_columns}, pad_id={self.pad_id}, "
            f"compressed={self.token_map is not None}"
        )
