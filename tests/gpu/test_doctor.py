"""`hicache doctor` where there is a GPU: it names the cards and finds everything that device: cuda needs."""

from __future__ import annotations

import torch

from hicache.observability.doctor.diagnosis import diagnose, is_broken, verdict


def test_doctor_names_the_gpu() -> None:
    findings = diagnose()
    found = {f"{finding.area} {finding.name}": finding for finding in findings}
    properties = torch.cuda.get_device_properties(0)
    cards = [finding.value for finding in findings if finding.area == "GPU" and finding.name.startswith("GPU ")]
    assert len(cards) == torch.cuda.device_count()
    assert cards[0].startswith(f"{properties.name}, ")
    assert f"{properties.multi_processor_count} multiprocessors" in cards[0]
    assert f"compute capability {properties.major}.{properties.minor}" in cards[0]
    for name in ("GPU driver", "GPU torch.cuda", "CuPy package", "CuPy NVRTC", "copies device: cuda"):
        assert found[name].status == "ok", found[name]
    assert not is_broken(findings)
    assert f"device: cuda works, {len(cards)} x {properties.name}" in verdict(findings)
