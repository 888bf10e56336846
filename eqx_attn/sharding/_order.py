"""How the tokens of a sequence are dealt to devices. Plain NumPy: all of it is known while tracing."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of tokens in an array that `devices` devices hold in equal, contiguous shares.

    `"contiguous"`: as they are. `"dual_chunk"`: device r holds chunks r and 2n-1-r of 2n chunks. `"striped"`: of stripes of
    `stripe` tokens device r holds every n-th, from the r-th on.
    """

    name: str
    stripe: int
    devices: int

    @property
    def multiple(self) -> int:
        """A length has to be a multiple of this."""
        return {"contiguous": 1, "dual_chunk": 2, "striped": self.stripe}[self.name] * self.devices

    def run(self, seq: int) -> int:
        """The array is made of runs of this many tokens with consecutive positions."""
        return {"contiguous": seq // self.devices, "dual_chunk": seq // (2 * self.devices), "striped": self.stripe}[
            self.name
        ]

    def summary_blocks(self) -> int:
        """In how many blocks of equal size a device's tokens are described by their extremes: its runs, where they are few."""
        return 2 if self.name == "dual_chunk" else 1

    def positions(self, seq: int) -> np.ndarray:
        """`[seq]`, int32: the position in the original sequence of each token of the array."""
        self.check(seq)
        devices = self.devices
        if self.name == "dual_chunk":
            chunks = np.stack([np.arange(devices), 2 * devices - 1 - np.arange(devices)], axis=1).reshape(-1)
            tokens = np.arange(seq).reshape(2 * devices, -1)[chunks]
        elif self.name == "striped":
            tokens = np.arange(seq).reshape(-1, devices, self.stripe).swapaxes(0, 1)
        else:
            tokens = np.arange(seq)
        return tokens.reshape(-1).astype(np.int32)

    def places(self, seq: int) -> np.ndarray:
        """`[seq]`, int32: where in the array the token of each position is; the inverse of `positions`."""
        return np.argsort(self.positions(seq)).astype(np.int32)

    def padded(self, seq: int) -> int:
        """The length that is dealt: `seq`, or more where that cannot be dealt equally."""
        return -(-seq // self.multiple) * self.multiple

    def pads(self, seq: int) -> bool:
        """Whether that is more."""
        return self.padded(seq) > seq

    def check(self, seq: int) -> None:
        """Raises ValueError where the length cannot be dealt."""
        # A length that no device can be given an equal share of is padded at its end, which only "contiguous" has.
        if seq % self.multiple and self.name != "contiguous":
            stripes = f" (stripes of {self.stripe})" if self.name == "striped" else ""
            raise ValueError(
                f"order={self.name!r} over {self.devices} devices{stripes} deals multiples of {self.multiple} tokens, and there "
                f"are {seq}: pad the sequence with tokens of id 0 (eqx_attn.Segments), or use order='contiguous'"
            )

    def visible(self, q_seq: int, kv_seq: int, lower: int | None, upper: int | None) -> np.ndarray:
        """`[devices, devices]`: whether some query of one may see some key of the other, `lower <= key - query <= upper`."""
        (q_low, q_high), (kv_low, kv_high) = self._extremes(q_seq), self._extremes(kv_seq)
        seen = np.ones((q_low.size, kv_low.size), bool)
        if upper is not None:
            seen &= kv_low.reshape(1, -1) - q_high.reshape(-1, 1) <= upper
        if lower is not None:
            seen &= kv_high.reshape(1, -1) - q_low.reshape(-1, 1) >= lower
        blocks = self.summary_blocks()
        return seen.reshape(self.devices, blocks, self.devices, blocks).any(axis=(1, 3))

    def _extremes(self, seq: int) -> tuple[np.ndarray, np.ndarray]:
        positions = self.positions(seq).reshape(self.devices * self.summary_blocks(), -1)
        return positions.min(1), positions.max(1)
