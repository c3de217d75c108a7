"""Certificates and verifications show themselves in one line, and as a table in a notebook."""

from dataclasses import replace
from xml.etree import ElementTree

import torch
from torch import nn

from orthoconv import Certificates, certify, verify
from orthoconv.certificates.display import curve, in_levels
from orthoconv.nn import CayleyLinear


def certificates() -> Certificates:
    logits, labels = torch.eye(4)[:, :3], torch.tensor([0, 1, 2, 0])
    radius = torch.tensor([0.05, 0.2, 0.5, 0.0])
    return Certificates(logits, labels, radius, 1.0, (36 / 255, 0.3))


def test_certificates_in_one_line() -> None:
    assert repr(certificates()) == "Certificates(4 examples, 75.0% correct, certified 50.0% at 36/255, 25.0% at 0.3)"


def test_certificates_in_a_notebook() -> None:
    page = ElementTree.fromstring(f"<div>{certificates()._repr_html_()}</div>")
    cells = ["".join(cell.itertext()) for cell in page.iter("td")]
    assert cells == ["0 (clean)", "75.0%", "36/255", "50.0%", "0.3", "25.0%"]
    (line,) = page.iter("polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert points[0] == (0.0, 22.5), "three of four have a radius, 90 pixels are 100 %"
    assert points[-1] == (260.0, 90.0), "none exceeds the largest"
    assert [y for _, y in points] == sorted(y for _, y in points)


def test_nothing_certified_has_no_curve() -> None:
    assert curve(torch.zeros(3)) == curve(torch.zeros(0)) == ""
    found = certify(nn.Flatten(), [(torch.zeros(2, 3), torch.tensor([0, 1]))])
    assert "<svg" not in found._repr_html_()


def test_verification() -> None:
    found = verify(CayleyLinear(6, 3), torch.rand(4, 6))
    assert repr(found).startswith("Verification(verified, 1 layers, Lipschitz bound 1")
    page = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    assert [cell.text for cell in page.iter("td")][:3] == ["model", "CayleyLinear", "orthogonal"]
    wrong = replace(found, layers=[replace(found.layers[0], name="<script>", largest=2.0)])
    assert "1 faults: <script> (CayleyLinear) promises to be orthogonal, but its norm is 2" in repr(wrong)
    assert "<script>" not in wrong._repr_html_()


def test_levels() -> None:
    assert [in_levels(e) for e in (36 / 255, 108 / 255, 1.0, 0.1411)] == ["36/255", "108/255", "1", "0.1411"]
