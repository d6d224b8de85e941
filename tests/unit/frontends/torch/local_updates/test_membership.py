"""Parameters, fragments and optimisers that do not fit together are refused."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.parameters import outer_optimizers, trained_parameters  # noqa: E402 - torch may be missing


def sgd(*modules):
    return torch.optim.SGD([part for module in modules for part in module.parameters()], lr=0.1)


def linear():
    return torch.nn.Linear(2, 3)


def test_a_fragment_has_what_needs_a_gradient_or_is_the_inner_optimisers():
    module = torch.nn.Sequential(linear(), linear(), linear())
    module[0].requires_grad_(False)
    module[1].requires_grad_(False)

    members = trained_parameters([module], sgd(module[1], module[2]))

    [(name, found)] = members.items()
    assert name == "fragment 0 (Sequential)"
    assert list(found) == ["0.1.weight", "0.1.bias", "0.2.weight", "0.2.bias"]
    expected = [*module[1].parameters(), *module[2].parameters()]
    assert all(one is other for one, other in zip(found.values(), expected, strict=True))


def test_weights_that_a_fragment_uses_twice_are_in_it_once():
    module = torch.nn.Sequential(linear(), linear())
    module[1].weight = module[0].weight

    [members] = trained_parameters([module], sgd(module)).values()

    assert len(members) == 3


def test_a_parameter_in_two_fragments_is_refused_and_both_are_named():
    first, second = linear(), linear()
    second.weight = first.weight

    with pytest.raises(UsageError, match=r"'weight' of fragment 0 \(Linear\) and 'weight' of fragment 1"):
        trained_parameters([first, second], sgd(first))


def test_a_fragment_without_trained_parameters_is_refused():
    with pytest.raises(UsageError, match=r"fragment 1 \(ReLU\) has no parameters that are trained"):
        trained_parameters([linear(), torch.nn.ReLU()], sgd(linear()))


def test_no_fragments_are_refused():
    with pytest.raises(UsageError, match="model_fragments is empty"):
        trained_parameters([], sgd(linear()))


def test_a_trained_parameter_outside_of_all_fragments_is_refused():
    inside, outside = linear(), torch.nn.Linear(5, 7)

    with pytest.raises(UsageError, match=r"shape \(7, 5\) that is in no fragment"):
        trained_parameters([inside], sgd(inside, outside))


def test_one_outer_optimiser_serves_all_fragments():
    members = {"a": dict(linear().named_parameters()), "b": dict(linear().named_parameters())}
    outer = torch.optim.SGD([*members["a"].values(), *members["b"].values()], lr=1.0)

    assert outer_optimizers(members, sgd(linear()), outer) == [outer, outer]


def test_a_wrong_number_of_outer_optimisers_is_refused():
    module = linear()

    with pytest.raises(UsageError, match="outer_optimizer has 2 optimizers for 1 fragments"):
        outer_optimizers({"a": dict(module.named_parameters())}, sgd(module), [sgd(module), sgd(module)])


def test_an_outer_optimiser_without_a_parameter_of_its_fragment_is_refused():
    first, second = linear(), torch.nn.Linear(5, 7)
    members = {"a": dict(first.named_parameters()), "b": dict(second.named_parameters())}

    with pytest.raises(UsageError, match=r"no parameter of shape \(7, 5\) that b has"):
        outer_optimizers(members, sgd(first, second), sgd(first))


def test_the_inner_optimiser_is_no_outer_one():
    module = linear()
    optimizer = sgd(module)

    with pytest.raises(UsageError, match="inner_optimizer is also an outer_optimizer"):
        outer_optimizers({"a": dict(module.named_parameters())}, optimizer, optimizer)
