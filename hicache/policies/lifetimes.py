"""How long entries go unused before they are used again, by class and age: learned, and turned into a rank.

Ages are measured in bytes of entry keys that entered the tier meanwhile, in half octaves. For a class and an age
bucket it counts what came into the bucket unused (`exposed`) and what of it was used there (`reused`): a
life table (Kaplan and Meier, 1958), in which entries may come late and leave early.

An entry is worth the most uses per byte and time that keeping it for some time can bring: over all horizons h,
the chance of a use until h divided by the time it is expected to take its place until then. This is the Gittins
index of the entry, and with the horizon always infinite the hit density of LHD (Beckmann et al., NSDI 2018).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CLASSES = 6
BUCKETS = 64
_UNIT = 6  # ages are counted in 2**_UNIT bytes

_DECAY = 0.99
_PRIOR_HAZARD = 0.05
_PRIOR_SHARE = 1 / 64
_LEAST_SHARE = 1 / 64
_RECENCY_BIAS = 0.02

Table = npt.NDArray[np.float64]


def bucket_of(age: int) -> int:
    """The bucket of an age in bytes: half octaves."""
    units = age >> _UNIT
    bits = units.bit_length()
    if bits < 2:
        return bits
    return min(2 * bits - 2 + (units >> (bits - 2) & 1), BUCKETS - 1)


def age_of(bucket: int) -> int:
    """The least age in bytes of a bucket."""
    if bucket < 2:
        return bucket << _UNIT
    return (2 + (bucket & 1)) << (bucket - 2) // 2 << _UNIT


_WIDTHS = np.array([age_of(bucket + 1) - age_of(bucket) for bucket in range(BUCKETS)], float)
_AGES = np.array([age_of(bucket) for bucket in range(BUCKETS)], float)


class Lifetimes:
    """Counts, in bytes of keys, and what follows from them."""

    def __init__(self) -> None:
        self.exposed = [0.0] * (CLASSES * BUCKETS)  # by cohort: class * BUCKETS + bucket
        self.reused = [0.0] * (CLASSES * BUCKETS)

    def densities(self, volume: float) -> Table:
        """Worth of an entry by class and bucket, of any scale; `volume` is the size of all entries in bytes.

        Where little is known a class is taken to be like all, and all to be used with the same chance in every half
        octave: what was used last is worth most. A slight bias to recent entries lets it be so among near equals.
        """
        reused = np.array(self.reused).reshape(CLASSES, BUCKETS)
        exposed = _smooth(np.maximum(np.array(self.exposed).reshape(CLASSES, BUCKETS), reused))
        reused = _smooth(reused)
        weight, least = max(volume, 1.0) * _PRIOR_SHARE, max(volume, 1.0) * _LEAST_SHARE
        everyone = (reused.sum(0) + weight * _PRIOR_HAZARD) / (exposed.sum(0) + weight)
        hazard = (reused + weight * everyone) / (exposed + weight)
        return np.asarray(_best_density(hazard, least) / (_AGES + least) ** _RECENCY_BIAS)

    def decay(self) -> None:
        """Let what was counted count less from now on."""
        for counts in (self.exposed, self.reused):
            counts[:] = [count * _DECAY for count in counts]


def _smooth(counts: Table) -> Table:
    """Counts of neighbouring buckets mixed: 1/4, 1/2, 1/4."""
    wide = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
    return np.asarray((wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]) / 4)


_AHEAD = np.triu(np.ones((BUCKETS, BUCKETS)))
"""1 where a horizon (second axis) is not before a bucket (first axis)."""


def _best_density(hazard: Table, least: float) -> Table:
    """Over all horizons, the chance of a use divided by the time until then and `least`."""
    unused = np.cumprod(1 - hazard[:, None, :] * _AHEAD, axis=2)
    before = np.concatenate([np.ones((len(hazard), BUCKETS, 1)), unused[:, :, :-1]], axis=2)
    spent = np.cumsum(_WIDTHS * _AHEAD * (before + unused) / 2, axis=2)
    return np.asarray(((1 - unused) / (spent + least)).max(2))
