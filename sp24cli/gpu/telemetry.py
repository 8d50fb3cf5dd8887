"""What the card says of itself while it works: power, heat, memory clock and what holds it back."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sp24cli.gpu.device import Device

#: NVML's throttle bits that slow a kernel down, in words.
_THROTTLE = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal",
    0x0000000000000040: "thermal (hardware)",
    0x0000000000000080: "power brake",
}


@dataclass(frozen=True)
class Sample:
    """One reading. Fields are None where NVML or the card does not tell."""

    mem_mhz: int | None = None
    power_w: float | None = None
    temp_c: int | None = None
    throttle: tuple[str, ...] = ()
    energy_mj: int | None = None
    limit_w: float | None = None


class Telemetry:
    """NVML readings of one card; without nvidia-ml-py every reading is empty."""

    def __init__(self, device: Device) -> None:
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # By UUID: NVML does not follow CUDA_VISIBLE_DEVICES.
            self._card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(device.uuid)}")
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def _ask(self, name: str, *arguments: object) -> Any:
        try:
            return getattr(self._nvml, name)(self._card, *arguments)
        except self._nvml.NVMLError:
            return None

    def _instant_power(self) -> float | None:
        """Milliwatts now; the plain reading averages over a second, longer than any window."""
        field = getattr(self._nvml, "NVML_FI_DEV_POWER_INSTANT", None)
        values = None if field is None else self._ask("nvmlDeviceGetFieldValues", [field])
        if values and values[0].nvmlReturn == self._nvml.NVML_SUCCESS:
            return float(values[0].value.uiVal)
        usage = self._ask("nvmlDeviceGetPowerUsage")
        return None if usage is None else float(usage)

    def sample(self) -> Sample:
        nvml = self._nvml
        if nvml is None:
            return Sample()
        power = self._instant_power()
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return Sample(
            mem_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1e3,
            temp_c=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttle=tuple(text for bit, text in _THROTTLE.items() if bits & bit),
            energy_mj=self._ask("nvmlDeviceGetTotalEnergyConsumption"),
            limit_w=None if limit is None else limit / 1e3,
        )
