"""Arguments of the wrong kind get an error that names what was given and what is taken."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import orthoconv
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin

X, Y = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
CALLS = {
    "verify": lambda model: orthoconv.verify(model, X),
    "certify": lambda model: orthoconv.certify(model, [(X, Y)]),
    "predict": lambda model: orthoconv.predict(model, X),
    "lipschitz_bound": lambda model: orthoconv.lipschitz_bound(model, (3, 4, 4)),
    "convert": lambda model: orthoconv.convert(model, (3, 4, 4)),
    "export": lambda model: orthoconv.export(model, (3, 4, 4)),
}
NO_MODELS = {
    "None": (None, "got None"),
    "name": ("resnet18", "got 'resnet18'"),
    "number": (3, "got 3"),
    "class": (nn.Linear, "got the class Linear itself; call it"),
    "function": (torch.relu, "got <built-in"),
    "weights": (nn.Linear(2, 2).state_dict(), "got a OrderedDict; if it holds weights"),
    "list": ([nn.ReLU()], r"got \[ReLU\(\)\]"),
    "tensor": (X, r"got a tensor of shape \(2, 3, 4, 4\)"),
    "array": (np.zeros(3), r"got array\(\[0., 0., 0.\]\)"),
    "optimizer": (torch.optim.SGD(nn.Linear(2, 2).parameters()), "got .*SGD"),
}


def network() -> nn.Module:
    return nn.Sequential(CayleyConv2d(3, 8, 3), MaxMin(), nn.Flatten(), CayleyLinear(128, 4))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("model", "given"), NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_no_module_is_refused(call: Any, model: Any, given: str) -> None:
    with pytest.raises(TypeError, match=rf"(?s)a model must be a module \(torch\.nn\.Module\), {given}"):
        call(model)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_module_is_taken(call: Any) -> None:
    call(network())


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (None, TypeError, "a DataLoader, got None"),
        (3, TypeError, "a DataLoader, got 3"),
        ("data", TypeError, r"got a str; one batch alone is \[\(x, labels\)\]"),
        (X, TypeError, "got a Tensor; one batch alone"),
        ((X, Y), TypeError, "got a Tensor; one batch alone"),
        ((3, 4, 4), TypeError, "got a int"),
        ([None], TypeError, "got a NoneType"),
        ([{"x": X, "y": Y}], TypeError, "got a dict"),
        ([(X, Y, Y)], TypeError, "got a tuple of Tensor, Tensor, Tensor"),
        ([(X.numpy(), Y.numpy())], TypeError, "got a tuple of ndarray, ndarray"),
        ([(X, [0, 1])], TypeError, "got a tuple of Tensor, list"),
        ([(X, Y[:1])], ValueError, r"one label for each input, got inputs \(2, 3, 4, 4\) and labels \(1,\)"),
        ([(X, Y[:, None])], ValueError, r"one label for each input, .* labels \(2, 1\)"),
        ([], ValueError, "at least one batch"),
    ],
)
def test_batches(batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        orthoconv.certify(network(), batches)


@pytest.mark.parametrize(
    ("eps", "error", "message"),
    [
        ("36/255", TypeError, "eps must be a number such as 36 / 255, or several, got '36/255'"),
        (["0.1"], TypeError, "got '0.1'"),
        (None, TypeError, "got None"),
        ([None], TypeError, "got None"),
        (-1, ValueError, "eps must be at least 0, got -1"),
        (float("nan"), ValueError, "eps must be at least 0, got nan"),
    ],
)
def test_eps(eps: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        orthoconv.certify(network(), [(X, Y)], eps=eps)


@pytest.mark.parametrize("eps", [0.1, [0.1], np.array([0.1]), torch.tensor([0.1]), np.float32(0.1), torch.tensor(0.1)])
def test_numbers_of_any_library_are_eps(eps: Any) -> None:
    (known,) = orthoconv.certify(network(), [(X, Y)], eps=eps).certified_accuracy
    assert known == pytest.approx(0.1, rel=1e-6)


def test_an_infinite_eps_can_be_shown() -> None:
    found = orthoconv.certify(network(), [(X, Y)], eps=float("inf"))
    assert "certified 0.0% at inf" in repr(found)


@pytest.mark.parametrize("shape", [None, "3,4,4", 4, (3.0, 4, 4), X, X.numpy(), (3, -4, 4), torch.tensor([3, 4, 4])])
@pytest.mark.parametrize("name", ["lipschitz_bound", "convert", "export"])
def test_shapes(name: str, shape: Any) -> None:
    with pytest.raises(ValueError, match="input_shape must be the shape of one input, such as"):
        getattr(orthoconv, name)(network(), shape)


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (1, 3, 4, 4), (1, 4, 4), (0, 4, 4)])
@pytest.mark.parametrize("name", ["lipschitz_bound", "convert", "export"])
def test_shapes_that_the_model_does_not_take(name: str, shape: Any) -> None:
    """A ConversionError is a ValueError, too."""
    with pytest.raises((ValueError, TypeError), match=r"shape|images"):
        getattr(orthoconv, name)(network(), shape)


def test_a_shape_of_numpy_is_taken() -> None:
    shape = tuple(np.array([3, 4, 4]))
    assert orthoconv.lipschitz_bound(network(), shape) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("value", ["1", [1.0], torch.ones(2), {}])
def test_constants_are_numbers(value: Any) -> None:
    given = "must be a number, got "
    with pytest.raises(TypeError, match=f"^lipschitz {given}"):
        orthoconv.certify(network(), [(X, Y)], lipschitz=value)
    with pytest.raises(TypeError, match=f"^lipschitz {given}"):
        orthoconv.certified_radius(torch.rand(2, 4), Y, value)
    with pytest.raises(TypeError, match=f"^claimed {given}"):
        orthoconv.verify(network(), X, claimed=value)


@pytest.mark.parametrize("value", [1, 1.0, np.float64(1), torch.tensor(1.0)])
def test_numbers_of_any_library_are_constants(value: Any) -> None:
    assert orthoconv.certify(network(), [(X, Y)], lipschitz=value).lipschitz == 1
    assert orthoconv.verify(network(), X, claimed=value).faults == []


@pytest.mark.parametrize("names", ["abcd", 4, {0: "a", 1: "b", 2: "c", 3: "d"}, [1, 2, 3, 4]])
def test_names_of_classes(names: Any) -> None:
    with pytest.raises(ValueError, match="class_names must be"):
        orthoconv.predict(network(), X, class_names=names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_not_exported() -> None:
    with pytest.raises(TypeError, match="is scripted, or a part of it is; export what it was made from"):
        orthoconv.export(torch.jit.script(nn.Sequential(nn.ReLU())), (3,))
