"""ONNX files that carry their certificate: float64 logits beside the float32 ones, and what bounds them, as metadata.

What a reader computes from such a file, with no more than a runtime and NumPy, is sound:

- f is the exact function of the operators as they are in float32. `lipschitz_bound` and pairwise bounds speak of f.
- The file evaluates f in float64 with the very same operators: the output `logits64`, here g. Float64 holds every entry
  of a float32 operator exactly, so g and f differ by rounding alone. `growth` in float64 bounds that for sums in any
  order: |g(x) - f(x)| <= e(x) = relative |x| + absolute. Nothing is asked of a runtime but IEEE float64.
- f_t - f_j is Lipschitz with the constant rates[t][j], and (g_t - g_j) - (f_t - f_j) is at most sqrt(2) e(x). So f has
  the class t at each x' that is nearer to x than (g_t(x) - g_j(x) - sqrt(2) e(x)) / rates[t][j] for all j.

The float32 logits play no part in this, whatever a runtime made of them.
"""

__all__ = ["certificate_metadata", "to_onnx"]

import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.certificates import growth, in_double
from orthoconv.certificates.algebra import Growth
from orthoconv.certificates.heads import pairwise_rates
from orthoconv.certificates.own_forward import headed_form
from orthoconv.devices import move
from orthoconv.exporting import export
from orthoconv.files import write_atomically
from orthoconv.linalg import row_norms
from orthoconv.models.describing import description_of
from orthoconv.modules import in_eval_mode, replace_modules, zeros_for
from orthoconv.nn.arguments import pair
from orthoconv.nn.normalize import Normalize, Scale
from orthoconv.nn.reparametrized import frozen
from orthoconv.twins import Twins

_MOST_RATES = 100  # classes with a rate for each pair
_SCALES = (1.0, -1.0, 0.01, 30.0, -1000.0)  # of the inputs that a certificate is tried on
_UP = 1 + 2.0**-40  # more than all rounding of the few operations that a rate is made of
_FAR = 1e-2  # of the largest logit: more than rounding does to a model that is of any use


def certificate_metadata(model: nn.Module, input_shape: Sequence[int]) -> dict[str, Any]:
    """Return what a certificate from float64 logits needs, as JSON has it.

    Returns:
        ``lipschitz_bound`` of the logits; ``rates``, bounds (classes, classes) of the Lipschitz constants of the
        differences of two logits, or None if there are more than 100 classes (each is then at most sqrt(2)
        lipschitz_bound); ``slack``, the numbers relative and absolute whose relative |x| + absolute bounds the l2 error
        of the float64 logits at x.
    """
    with torch.no_grad(), in_eval_mode(model), frozen(model):
        grown = growth(model, input_shape, torch.float64)
        classes = model(zeros_for(model, input_shape)).shape[-1]
        usual = math.sqrt(2) * grown.lipschitz * _UP
        rates = torch.full((classes, classes), usual, dtype=torch.float64).fill_diagonal_(0)
        form = headed_form(model, input_shape)
        pairwise = pairwise_rates(form, lambda body: growth(body, input_shape, torch.float64).lipschitz)
        if pairwise is not None:
            rates = rates.minimum(_UP * pairwise.cpu())
    grown.error(0.0)  # or an error that names what nobody can bound
    return {
        "lipschitz_bound": grown.lipschitz,
        "rates": rates.tolist() if classes <= _MOST_RATES else None,
        "slack": {"relative": grown.relative, "absolute": grown.absolute},
    }


def to_onnx(
    model: nn.Module,
    x: Tensor,
    path: Path | str,
    *,
    certificate: bool | None = False,
    class_names: Sequence[str] | None = None,
) -> bool:
    """Write a model as an ONNX file, in the plain form of `export`: images in, logits out, any number of images.

    With a certificate, the file has a second output, ``logits64``, and metadata from which a reader computes certified
    radii without this library; docs/predicting.md shows how. Metadata of every file are the shape of an image, the
    normalisation that is in the file, and the names of the classes, if they are known.

    Arguments:
        model: Any model that `export` takes.
        x: Some inputs (b, ...) in [0, 1], of which the certificate is tried; b is at least 2.
        path: File to write.
        certificate: Whether to write what certificates need. With None, where that is possible: the model must have a
            bound, and the runtime must be there and know its operations in float64.
        class_names: Names of the classes; by default those that the model knows.

    Returns:
        Whether the file has a certificate.

    Raises:
        ValueError: If ONNX has no form of an operation of the model.

    >>> from orthoconv.nn import CayleyLinear
    >>> to_onnx(CayleyLinear(4, 2), torch.rand(2, 4), Path("model.onnx"))  # doctest: +SKIP
    False
    """
    _require_packages()
    if not isinstance(x, Tensor) or x.ndim < 1 or len(x) < 2:
        given = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"to_onnx takes at least two inputs (b, ...), such as torch.rand(2, *shape), got {given}")
    path = Path(path)
    shape, names = tuple(x.shape[1:]), class_names or description_of(model).class_names
    facts: dict[str, Any] = {"input_shape": list(shape), "classes": None if names is None else list(names)}
    facts |= {"input_range": [0.0, 1.0], "normalization": _normalization(model)}
    if certificate is not False:
        try:
            certified = facts | certificate_metadata(model, shape)
            twins = Twins(model, shape)
            twins.single = _spelled_out(twins.single)
            content = _content(twins, type(model).__name__, x, ["logits", "logits64"], certified)
            _try_out(content, model, x, shape)
            _compare_logits(content, model, x)
        except (TypeError, ValueError) as error:
            if certificate:
                raise ValueError(f"{error}; certificate=False writes the logits alone") from error
        else:
            write_atomically(path, content)
            return True
    content = _content(_spelled_out(export(model, shape)), type(model).__name__, x, ["logits"], facts)
    _compare_logits(content, model, x)
    write_atomically(path, content)
    return False


def _require_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('ONNX needs onnx and onnxscript: pip install "orthoconv[export]"') from error


def _normalization(model: nn.Module) -> dict[str, list[float]] | None:
    """Return mean and standard deviation that the model itself subtracts and divides by, if it begins with that."""
    first = next(iter(model.children()), None)
    return {"mean": first.mean.tolist(), "std": first.std.tolist()} if isinstance(first, Normalize) else None


def _spelled_out(module: nn.Module) -> nn.Module:
    """Replace modules that torch's exporter writes wrongly, in silence, by others that compute the same."""
    plain = {m: spell(m) for m in module.modules() if (spell := _SPELLED.get(type(m)))}
    replace_modules(module, plain)
    return plain.get(module, module)


def _divided_pool(pool: nn.Module) -> nn.Module:
    """Write an average pool whose divisor the exporter leaves out.

    It is the mean of each window, padding included, times the size of the window over the divisor.
    """
    assert isinstance(pool, nn.AvgPool2d)
    if not pool.divisor_override or pool.ceil_mode:
        return pool
    kh, kw = pair("kernel_size", pool.kernel_size)
    return nn.Sequential(nn.AvgPool2d((kh, kw), pool.stride, pool.padding), Scale(kh * kw / pool.divisor_override))


def _log_sigmoid(module: nn.Module) -> nn.Module:
    """Write log sigmoid(x) as -softplus(-x): the exporter's log of a sigmoid that is 0 is infinite from x = -104 on."""
    return nn.Sequential(Scale(-1.0), nn.Softplus(), Scale(-1.0))


_SPELLED: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {
    nn.AvgPool2d: _divided_pool,
    nn.LogSigmoid: _log_sigmoid,
}


def _content(module: nn.Module, name: str, x: Tensor, outputs: list[str], facts: dict[str, Any]) -> bytes:
    """Return the bytes of an ONNX file."""
    import onnx

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")  # which misses torchvision
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module.cpu(), (x.cpu(),), dynamo=True, verbose=False, output_names=outputs,
                dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), input_names=["images"],
            )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"{name} cannot be written as ONNX: {reason}") from error
    finally:
        logger.setLevel(level)
    assert program is not None
    proto = program.model_proto
    _share_operators(proto)
    for part in (*proto.graph.node, *proto.graph.value_info, *proto.graph.initializer, proto.graph):
        del part.metadata_props[:]  # traces through files of this machine, longer than the graph
    onnx.helper.set_model_props(proto, {key: json.dumps(value) for key, value in facts.items()})
    return bytes(proto.SerializeToString())


def _share_operators(proto: Any) -> None:
    """Store each float64 operator whose entries are float32 numbers as such, and once if the float32 form has it too.

    A node casts it, which changes no number. A runtime does that once, when it opens the file.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    graph, kept, casts = proto.graph, [], []
    arrays = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    known = {(a.shape, a.tobytes()): name for name, a in arrays.items() if a.dtype == np.float32}
    for one in graph.initializer:
        array = arrays[one.name]
        single = array.astype(np.float32) if array.dtype == np.float64 and array.size > 1 else None
        if single is None or not np.array_equal(single.astype(np.float64), array):
            kept.append(one)
            continue
        key = (single.shape, single.tobytes())
        if key not in known:
            known[key] = f"{one.name}_single"
            kept.append(numpy_helper.from_array(single, known[key]))
        casts.append(helper.make_node("Cast", [known[key]], [one.name], to=TensorProto.DOUBLE))
    nodes = [*casts, *graph.node]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)


def _compare_logits(content: bytes, model: nn.Module, x: Tensor) -> None:
    """Raise an error if the logits of a file are not those of the model, whatever rounding does.

    Nothing is compared without a runtime, or if it lacks an operation: the file may be for another one.
    """
    try:
        computed = _computed(content, x)
    except Exception:  # of a class of its own for each kind of fault
        return
    if computed is None:
        return
    with torch.no_grad(), in_eval_mode(model), frozen(model):
        expected = model(move(model, x)[0]).cpu().double()
    apart = float((torch.from_numpy(computed[0]).double() - expected).abs().max())
    if not apart <= _FAR * float(expected.abs().max()):  # nor if it is no number
        raise ValueError(
            f"the ONNX file that torch writes for {type(model).__name__} is wrong: its logits differ by {apart:.2g} "
            f"from those of the model, which are up to {float(expected.abs().max()):.2g}; no file was written"
        )


def _computed(content: bytes, x: Tensor) -> list[Any] | None:
    """Return what a file computes of x; None without a runtime."""
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    outputs: list[Any] = session.run(None, {"images": x.cpu().numpy()})
    return outputs


def _try_out(content: bytes, model: nn.Module, x: Tensor, shape: Sequence[int]) -> None:
    """Raise an error unless the float64 logits of a file, and those of `in_double`, agree to what bounds them both.

    The inputs are tried at several scales: a runtime may lose digits far from 0, or near it.
    """
    x = torch.cat([scale * x.cpu() for scale in _SCALES])
    with torch.no_grad(), in_eval_mode(model), frozen(model):
        grown, exact = growth(model, shape, torch.float64), in_double(model).cpu()(x.double())
    try:
        computed = _computed(content, x)
    except Exception as error:  # of a class of its own for each kind of fault
        raise ValueError(f"the runtime cannot compute the model in float64: {error}") from error
    if computed is None:
        raise ValueError('a certificate is tried out by onnxruntime, which is missing: pip install "orthoconv[export]"')
    _require_close(torch.from_numpy(computed[1]), exact, grown, x)


def _require_close(computed: Tensor, exact: Tensor, grown: Growth, x: Tensor) -> None:
    apart, bound = row_norms(computed - exact), grown.error(row_norms(x.cpu().double()))
    if not bool((apart <= 2 * bound + sys.float_info.min).all()):  # nor if it is no number
        raise ValueError(
            f"the float64 logits of the file differ by {apart.max():.2g} from those of the model, where rounding "
            f"explains {bound.max():.2g}"
        )
