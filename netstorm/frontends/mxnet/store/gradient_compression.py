"""`set_gradient_compression`: which key travels how, and what that keeps of each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netstorm import clock
from netstorm.compression.auto import Auto
from netstorm.compression.codec import AGREED, AnyArray, Codec, Place, Rounds, State, Uncompressed
from netstorm.compression.quantised import Signs, TwoBit, quantised
from netstorm.compression.registry import CODECS, CodecRules, rules_of
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.kvstore.calls import Agreed, EncodedSum, TensorKeys, encoded_keys
from netstorm.kvstore.forms import Key
from netstorm.kvstore.process.runtime import Runtime, describe_compression
from netstorm.protocol.codecs import ROW_SPARSE

__all__ = ["EncodedKey", "GradientCompression", "Residual", "compression_of"]

Floats = npt.NDArray[np.float32]


class GradientCompression:
    """How the pushes of a store travel: a codec for each key."""

    def __init__(self, rules: CodecRules) -> None:
        self._rules: Final = rules
        self._codecs: Final[dict[str, Codec | None]] = {}
        self.measures: Final = any(isinstance(codec, Auto) for codec in rules.codecs)
        """Which codec a gradient has depends on what is measured."""
        text = rules.fingerprint.removeprefix("*: ") if len(rules.codecs) == 1 else rules.fingerprint
        self.description: Final = text + (", which measures first" if self.measures else "")
        """For a person."""
        self.fingerprint: Final = f" compression={rules.fingerprint}"
        """Part of the fingerprint of a round: all ranks must compress alike."""

    def codec_of(self, name: str) -> Codec | None:
        """Return the codec of a key; None: it is exempt.

        Args:
            name: of the key, or of the parameter that it holds.

        Raises:
            UsageError: no pattern matches it.
        """
        if name not in self._codecs:
            codec = self._rules.of(name)
            self._codecs[name] = None if type(codec) is Uncompressed else codec
        return self._codecs[name]

    def form(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the codec of most rounds of a key."""
        codec = self.codec_of(name)
        return 0 if codec is None else codec.form(shape) or 0

    def check_key(self, key: Key, what: str, name: str | None = None) -> None:
        """Check that a key can be compressed; MXNet has the same limit.

        Raises:
            UsageError: its type is not float32.
        """
        if self.codec_of(name or key.name) is not None and (
            key.dtype != np.float32 or key.spec.form == ROW_SPARSE
        ):
            raise UsageError(
                f"{what} of key {key.name!r}, which is {key.spec.dtype}: gradient compression is for dense "
                "float32 only, as MXNet's is; exempt such keys by a rule such as "
                "{'NAME': 'none', '*': …}, or keep them in a store without it"
            )

    def check_for_owners(self) -> None:
        """Check that an asynchronous store, which applies pushes one by one, can use these codecs.

        Raises:
            UsageError: there is another one than 2bit.
        """
        for codec in self._rules.codecs:
            if not isinstance(codec, TwoBit):
                raise UsageError(
                    f"gradient compression {codec.name!r} in an asynchronous store, which knows '2bit' only"
                )

    def two_bit_of(self, name: str) -> TwoBit:
        """Return the codec of a key of an asynchronous store."""
        codec = self.codec_of(name)
        assert isinstance(codec, TwoBit), f"{name} has {codec}"
        return codec


class Residual:
    """What compression keeps of a key on this node from one push to the next."""

    def __init__(self) -> None:
        self.array: Final[NDArray] = mx.nd.zeros((1,))
        """Written by each operation that changes what is kept, so that MXNet's engine keeps their order."""
        self.state: Final[State] = {}
        """Of the codec; to be used by those operations."""
        self.keys: TensorKeys | None = None
        """Those of the codec."""

    def values(self) -> dict[str, NDArray] | None:
        """Return what is kept, after all that is queued; None: nothing."""
        self.array.wait_to_read()
        with mx.util.np_shape(True):
            return {name: mx.nd.array(kept, dtype=kept.dtype) for name, kept in self.state.items()} or None

    def restore(self, values: Mapping[str, NDArray]) -> None:
        """Begin with what was kept before."""
        self.array.wait_to_read()
        self.state.update({name: np.array(kept.asnumpy(), order="C") for name, kept in values.items()})

    def agreed(self) -> Agreed | None:
        """Return what the codec has agreed on with the other ranks; None: nothing. No push may be under
        way.
        """
        return None if self.keys is None else Agreed.of(self.keys, self.state)

    def begin_agreed(self, state: AnyArray) -> None:
        """Begin with what the other ranks have agreed on, before the first push."""
        self.state[AGREED] = np.array(state)

    def with_uncounted(self, gradient: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a gradient and what came too late of those before. What is counted becomes zero."""
        kept = self.state.get("uncounted")
        if kept is None:
            kept = self.state["uncounted"] = np.zeros_like(gradient)
        kept += gradient
        return kept

    def quantise(self, gradient: Floats, codec: TwoBit) -> Signs:
        """Return what a push to owners sends of a gradient, and keep the rest."""
        rest = self.state.get("residual")
        if rest is None:
            rest = self.state["residual"] = np.zeros(gradient.size, np.float32)
        return quantised(gradient, rest, codec.threshold)


class EncodedKey:
    """A key whose gradients travel under a codec, and its further keys."""

    def __init__(
        self, runtime: Runtime, key: Key, codec: Codec, residual: Residual, first: Mapping[str, int]
    ) -> None:
        """Register the further keys.

        Args:
            runtime: of this process.
            key: the key itself.
            codec: how its gradients travel.
            residual: what that keeps.
            first: the first rounds of further keys that the job has had before this rank came, by name.
        """

        def register(name: str, shape: tuple[int, ...], form: int) -> Key:
            further = runtime.register(key.spec.namespace, name, shape, "float32", form=form)
            if name in first:
                further.begin_at(first[name])
            return further

        self.codec: Final = codec
        self.residual: Final = residual
        self._runtime: Final = runtime
        self._shape: Final = key.spec.shape
        self._keys: Final = encoded_keys(codec, key, register)
        residual.keys = self._keys

    @property
    def counted_by(self) -> Key:
        """The key whose rounds count the pushes: the key's own, or a further one."""
        return self._keys.counting

    @property
    def further(self) -> list[Key]:
        """The further keys that each push has a round of."""
        occasional = self._keys.occasional
        return [key for key in self._keys.keys[1:] if key is not None and key not in occasional]

    def next_sum(self, priority: int, rule: str) -> EncodedSum:
        """Take the numbers of the rounds of the next push, on the thread that pushes."""
        return EncodedSum(
            self._keys,
            submit=self._runtime.submit,
            later=self._runtime.computing.run,
            fail=self._runtime.fail,
            priority=priority,
            rule=rule,
        )

    def rounds(
        self, gradient: Floats, total: EncodedSum, then: Callable[[Floats, int], None] | None
    ) -> Rounds:
        """Return the rounds that make a gradient the sum, in place.

        Args:
            gradient: flat.
            total: the sum.
            then: called with the sum and the bit set of its ranks.
        """
        runtime = self._runtime
        places = runtime.settings.places
        place = Place(self._shape, places, runtime.rank, total.number, clock.monotonic)
        yield from self.codec.rounds(gradient, self.residual.state, place)
        if isinstance(self.codec, Auto) and (news := self.codec.take_news()):
            describe_compression(runtime, f"auto: {news}")
        if then is not None:
            then(gradient, total.contributors)


def compression_of(parameters: object, *, size_lower_bound: int) -> GradientCompression:
    """Return the compression that the parameters of `set_gradient_compression` describe.

    Args:
        parameters: a dictionary with `type` and the parameters of that codec; or one with patterns of keys'
            names, and the codec of each. Further parameters of 2bit are ignored, as MXNet does.
        size_lower_bound: of mpq, unless it is given one.

    Raises:
        UsageError: another type, or a bad parameter.
    """
    if not isinstance(parameters, dict):
        raise UsageError(
            f"gradient compression takes a dictionary such as {{'type': '2bit', 'threshold': 0.5}}, "
            f"not {parameters!r}"
        )
    known = ", ".join(f"'{name}'" for name in CODECS)
    if "type" in parameters and str(parameters["type"]) not in CODECS:
        raise UsageError(
            f"Unknown type for gradient compression {parameters['type']!r}; NetStorm knows {known}"
        )
    if "type" not in parameters and not (
        parameters and all(isinstance(described, (str, Mapping)) for described in parameters.values())
    ):
        raise UsageError(f"gradient compression {parameters!r} has no type; NetStorm knows {known}")
    if "type" in parameters:
        described = _tidied(parameters, size_lower_bound)
    else:
        described = {pattern: _tidied(one, size_lower_bound) for pattern, one in parameters.items()}
    return GradientCompression(rules_of(described))


def _tidied(codec: str | Mapping[str, Any], size_lower_bound: int) -> dict[str, Any]:
    """Return the description of one codec as the registry takes it."""
    described = {"type": codec} if isinstance(codec, str) else dict(codec)
    name = str(described.get("type"))
    if name == "mpq":
        return {"size_lower_bound": size_lower_bound, **described}
    if name != "2bit":
        return described
    return {name: given for name, given in described.items() if name in {"type", "threshold"}}
