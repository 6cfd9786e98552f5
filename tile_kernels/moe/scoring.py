"""How a gate turns logits into scores."""

from __future__ import annotations

from enum import IntEnum


class ScoringFunc(IntEnum):
    """The scoring functions of the gates; `str()` gives the name that they take.

    | member | score of logit `x` | ranked by |
    |---|---|---|
    | `SIGMOID` | `1 / (1 + exp(-x))` | score + bias |
    | `SQRTSOFTPLUS` | `sqrt(log1p(exp(x)))`, `sqrt(x)` above 20 | score + bias |
    | `SOFTMAX` | `exp(x - max) / sum` over the row | logit + bias |
    | `IDENTITY` | | no gate takes it |

    >>> ScoringFunc.from_str("SoftMax") is ScoringFunc.SOFTMAX
    True
    >>> str(ScoringFunc.SQRTSOFTPLUS)
    'sqrtsoftplus'
    """

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @classmethod
    def from_str(cls, label: str) -> ScoringFunc:
        """The member of that name, in any case."""
        try:
            return cls[label.upper()]
        except KeyError:
            raise ValueError(f"{label} is not a valid ScoringFunc") from None
