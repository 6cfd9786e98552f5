"""From token ids to the rows of the tables: vocabulary, table sizes, multipliers, hashes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tile_kernels import engram as ops
from tile_kernels.engram.hash.op import MAX_LAYERS, MAX_WINDOW
from tile_kernels.engram.hash.reference import make_offsets
from tile_kernels.runtime import checks

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
    """Computes an id for each token, equal for tokens whose normalized texts are equal.

    Ids count up from 0 in the order in which texts first appear, so that their number is the size
    of the compressed vocabulary. Pass different texts for two tokens of equal text that must have
    different ids (bytes that are not text, special tokens).

    Args:
        tokens: The text of each token. Texts that `normalized_text` makes equal share an id.

    Returns:
        `[len(tokens)]`, int32.

    Example:
        >>> compression_map(["the", " The", "cat", "THE", " "]).tolist()
        [0, 0, 1, 0, 2]
    """
    ids: dict[str, int] = {}
    canonical = [ids.setdefault(normalized_text(token), len(ids)) for token in tokens]
    return torch.tensor(canonical, dtype=torch.int32, device="cpu")


def prime_table_sizes(
    num_layers: int, max_ngram_size: int, num_tables: int, table_rows: int | Sequence[int]
) -> Tensor:
    """Computes the sizes of all tables: distinct primes from `table_rows` on.

    Two n-grams that collide in one table hardly ever collide in another, because the sizes have no
    common divisor.

    Args:
        num_layers: The number of layers.
        max_ngram_size: N-grams have 2 to `max_ngram_size` tokens.
        num_tables: The number of tables for each order of n-grams.
        table_rows: The least size: one number, or one for each order from 2 on.

    Returns:
        `[num_layers, max_ngram_size - 1, num_tables]`, int32.

    Example:
        >>> prime_table_sizes(2, 3, 2, [10, 100]).tolist()
        [[[11, 13], [101, 103]], [[17, 19], [107, 109]]]
    """
    orders = max_ngram_size - 1
    with checks.named("prime_table_sizes"):
        wanted = _rows_of_orders(table_rows, orders)
    taken: set[int] = set()
    searches = {rows: _primes_from(rows, taken) for rows in wanted}
    sizes = [
        [[next(searches[rows]) for _ in range(num_tables)] for rows in wanted]
        for _ in range(num_layers)
    ]
    flat = torch.tensor(sizes, dtype=torch.int32, device="cpu")
    return flat.view(num_layers, orders, num_tables)


def _rows_of_orders(table_rows: Any, orders: int) -> list[int]:
    """The least rows of a table for each order of n-grams."""
    given = checks.plain(table_rows)
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given] * orders
    if len(given) != orders:
        raise ValueError(
            f"table_rows must be one number or {orders}, one for each order from 2 to "
            f"{orders + 1}, got {len(given)}"
        )
    return [checks.integer("table_rows", rows, 1) for rows in given]


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
    """Draws random odd multipliers of the hash.

    Each is `2 r + 1` with `r` uniform in `[0, (2^63 - 1) // vocab_size // 2)`. It is therefore
    below `2^63 / vocab_size`, and its product with any id below `vocab_size` fits in 63 bits.

    Args:
        num_layers: The number of layers; the multipliers of a layer do not depend on it.
        max_ngram_size: The multipliers of a layer, one per token of an n-gram.
        vocab_size: Ids are below this number.
        seed: The seed.

    Returns:
        `[num_layers, max_ngram_size]`, int64.

    Example:
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


class _Constants(NamedTuple):
    """What the hash needs besides the pad token; the names are those of the buffers."""

    multipliers: Tensor
    vocab_sizes: Tensor
    offsets: Tensor
    token_map: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> _Constants:
        """The same of changed tensors."""
        return _Constants(
            change(self.multipliers), change(self.vocab_sizes), change(self.offsets),
            None if self.token_map is None else change(self.token_map),
        )  # fmt: skip


class EngramHasher(nn.Module):
    """Computes the rows of the tables for token ids, for all Engram layers of a model at once.

    `multipliers` `[L, N]`, `vocab_sizes` `[L, N - 1, E]`, `offsets` `[L, C]` and `token_map` are
    buffers. They and the mapped `pad_id` are the state. Offsets are int64 if a layer has more than
    2^31 rows. Ids in host memory are hashed there, with copies that are kept if the buffers are on
    a GPU; change these buffers with `load_state_dict` only.

    Args:
        num_layers: The number of Engram layers of the model.
        vocab_size: The size of the vocabulary; ignored if there is a `token_map`.
        table_rows: The least number of rows of a table: one number, or one for each order of
            n-grams.
        max_ngram_size: N-grams have 2 to `max_ngram_size` tokens.
        num_tables: The number of tables for each order.
        pad_id: The token before the start of a document. Inside a document it ends n-grams.
        token_map: `[V]` of `compression_map`, which is applied to ids and to `pad_id`; or None.
        seed: The seed of the multipliers.
        device: The device of the buffers.

    Example:
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
        with checks.named("EngramHasher"):
            num_layers = checks.integer("num_layers", num_layers, 1, MAX_LAYERS)
            max_ngram_size = checks.integer("max_ngram_size", max_ngram_size, 2, MAX_WINDOW)
            table_rows = _rows_of_orders(table_rows, max_ngram_size - 1)
            for rows in table_rows:
                checks.integer("table_rows", rows, 1, _INT32_MAX)
            num_tables = checks.integer("num_tables", num_tables, 1, MAX_LAYERS)
            pad_id = checks.integer("pad_id", pad_id, -_INT32_MAX - 1, _INT32_MAX)
            seed = checks.integer("seed", seed, -(2**62), 2**62)
            if token_map is None:
                vocab_size = checks.integer("vocab_size", vocab_size, 1, _INT32_MAX + 1)
            else:
                checks.tensor("token_map", token_map, ("V",), checks.INTEGERS)
                if token_map.is_meta or token_map.numel() == 0:
                    raise ValueError("token_map must hold the id of each token, got no values")
                checks.in_range("token_map", token_map, 0, _INT32_MAX)
            checks.device("device", device)
        if token_map is not None:
            vocab_size = int(token_map.max()) + 1
            if 0 <= pad_id < len(token_map):
                pad_id = int(token_map[pad_id])
        with checks.named("EngramHasher"):
            sizes = prime_table_sizes(num_layers, max_ngram_size, num_tables, table_rows)
        wide = max(_rows_per_layer(sizes)) > 2**31
        initial = _Constants(
            odd_multipliers(num_layers, max_ngram_size, vocab_size, seed),
            sizes,
            make_offsets(sizes, torch.int64 if wide else torch.int32),
            token_map,
        )
        self._set_up(initial, pad_id, torch.get_default_device() if device is None else device)

    def _set_up(self, initial: _Constants, pad_id: int, device: torch.device | str) -> None:
        """Keep the initial constants in host memory, and register buffers that hold them."""
        self._initial, self._initial_pad_id = initial.map(_host_copy), pad_id
        for name, value in self._initial._asdict().items():
            buffer = None if value is None else torch.empty_like(value, device=device)
            self.register_buffer(name, buffer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The constants that the hasher was made with; from the seed, not random."""
        for name, value in self._initial._asdict().items():
            if value is not None:
                getattr(self, name).copy_(value)
        self.pad_id = self._initial_pad_id
        self._host = self._initial

    @property
    def max_ngram_size(self) -> int:
        """Tokens of the longest n-gram."""
        return self.multipliers.shape[1]

    @property
    def rows_per_layer(self) -> list[int]:
        """The rows that the tables of each layer have together."""
        return _rows_per_layer(self._on_host().vocab_sizes)

    @property
    def num_layers(self) -> int:
        """Engram layers of the model."""
        return self.multipliers.shape[0]

    @property
    def num_columns(self) -> int:
        """Tables of one layer, `(max_ngram_size - 1) * num_tables`."""
        return self.offsets.shape[1]

    def layer(self, layer: int) -> EngramHasher:
        """Returns a hasher for one of the layers, with separate buffers.

        Args:
            layer: The index of the layer.
        """
        layer = checks.integer("EngramHasher: layer", layer, 0, self.num_layers - 1)
        one = EngramHasher.__new__(EngramHasher)
        nn.Module.__init__(one)
        constants, part = self._on_host(), slice(layer, layer + 1)
        initial = constants.map(lambda x: x[part])._replace(token_map=constants.token_map)
        one._set_up(initial, self.pad_id, self.multipliers.device)
        return one

    def forward(self, token_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hashes the n-grams of token ids.

        Args:
            token_ids: `[S]` or `[B, S]`, int32 or int64. Ids in host memory never wait for a GPU.
            cu_seqlens: The starts of documents, as in `tile_kernels.engram.ngram_windows`, or None.

        Returns:
            The rows, `[L, *token_ids.shape, C]`, on the device of the ids.
        """
        if not isinstance(token_ids, Tensor):
            kind = type(token_ids).__name__
            raise TypeError(f"EngramHasher: token_ids must be a torch.Tensor, got {kind}")
        device = token_ids.device
        if device.type == "cpu":
            constants = self._on_host()
        else:
            constants = self._constants().map(lambda buffer: buffer.to(device))
        windows = ops.ngram_windows(
            token_ids.contiguous(), self.max_ngram_size, self.pad_id, cu_seqlens,
            constants.token_map,
        )  # fmt: skip
        rows = ops.engram_hash(windows.flatten(0, -2), *constants[:3])
        return rows.view(self.num_layers, *token_ids.shape, self.num_columns)

    def _constants(self) -> _Constants:
        return _Constants(self.multipliers, self.vocab_sizes, self.offsets, self.token_map)

    def _on_host(self) -> _Constants:
        """The buffers if they are in host memory, otherwise the copies that are."""
        return self._constants() if self.multipliers.device.type == "cpu" else self._host

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngramHasher:
        """Buffers that leave the host leave copies behind."""
        self._host = self._on_host().map(_host_copy)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Loads, and renews the copies in host memory."""
        super()._load_from_state_dict(*arguments, **options)
        if not self.multipliers.is_meta:
            self._host = self._constants().map(_host_copy)

    def get_extra_state(self) -> Tensor:
        """The pad token, which is a number and not a buffer: kernels take it from the host."""
        return torch.tensor(self.pad_id, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Restores the pad token from a state.

        Args:
            state: The extra state of a `state_dict`.
        """
        self.pad_id = int(state)

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        return (
            f"layers={self.num_layers}, max_ngram_size={self.max_ngram_size}, "
            f"tables={self.num_columns}, pad_id={self.pad_id}, "
            f"compressed={self.token_map is not None}"
        )


def _rows_per_layer(vocab_sizes: Tensor) -> list[int]:
    rows: list[int] = vocab_sizes.flatten(1).sum(1, dtype=torch.int64).tolist()
    return rows


def _host_copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)
