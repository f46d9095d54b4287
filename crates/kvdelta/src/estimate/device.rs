// SPDX-License-Identifier: Apache-2.0

//! What devices can do, by their makers' data sheets.

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

/// A device, or what it can do, that is not in the table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum DeviceError {
    #[error("unknown device `{0}`: one of {known}; else give --compute-rate", known = Device::known())]
    Unknown(String),
    #[error("unknown precision `{0}`: bf16 or fp8")]
    UnknownPrecision(String),
    #[error("{0} has no FP8 matrix units")]
    NoFp8(&'static str),
}

/// What the matrix units multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    Bf16,
    Fp8,
}

impl Precision {
    /// Bytes of a weight.
    pub(crate) fn weight_bytes(self) -> f64 {
        match self {
            Self::Bf16 => 2.0,
            Self::Fp8 => 1.0,
        }
    }
}

impl Display for Precision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

impl FromStr for Precision {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        match text.to_ascii_lowercase().as_str() {
            "bf16" => Ok(Self::Bf16),
            "fp8" => Ok(Self::Fp8),
            _ => Err(DeviceError::UnknownPrecision(text.to_owned())),
        }
    }
}

/// A device's peaks.
#[derive(Debug, PartialEq)]
pub(crate) struct Device {
    pub(crate) name: &'static str,
    /// Dense, in 10^12 operations a second; sheets that give sparse figures are halved.
    bf16_teraflops: f64,
    /// `None`: no FP8 matrix units.
    fp8_teraflops: Option<f64>,
    /// In 10^12 bytes a second.
    memory_terabytes: f64,
    pub(crate) source: &'static str,
}

/// Peaks are never reached; `--utilisation` says how much of them is.
pub(crate) const DEVICES: [Device; 7] = [
    Device {
        name: "a100",
        bf16_teraflops: 312.0,
        fp8_teraflops: None,
        memory_terabytes: 2.039,
        source: "NVIDIA A100 80GB SXM, A100 Tensor Core GPU data sheet",
    },
    Device {
        name: "l40s",
        bf16_teraflops: 362.0,
        fp8_teraflops: Some(733.0),
        memory_terabytes: 0.864,
        source: "NVIDIA L40S data sheet",
    },
    Device {
        name: "h20",
        bf16_teraflops: 148.0,
        fp8_teraflops: Some(296.0),
        memory_terabytes: 4.0,
        source: "NVIDIA HGX H20; no public data sheet, figures as reported by resellers and press",
    },
    Device {
        name: "h100",
        bf16_teraflops: 989.4,
        fp8_teraflops: Some(1978.9),
        memory_terabytes: 3.35,
        source: "NVIDIA H100 SXM5, H100 data sheet and architecture white paper",
    },
    Device {
        name: "h200",
        bf16_teraflops: 989.4,
        fp8_teraflops: Some(1978.9),
        memory_terabytes: 4.8,
        source: "NVIDIA H200 SXM, H200 data sheet",
    },
    Device {
        name: "b200",
        bf16_teraflops: 2250.0,
        fp8_teraflops: Some(4500.0),
        memory_terabytes: 8.0,
        source: "NVIDIA DGX B200 data sheet, an eighth of the system",
    },
    Device {
        name: "mi300x",
        bf16_teraflops: 1307.4,
        fp8_teraflops: Some(2614.9),
        memory_terabytes: 5.3,
        source: "AMD Instinct MI300X data sheet",
    },
];

impl Device {
    fn known() -> String {
        DEVICES.map(|device| device.name).join(", ")
    }

    /// The device of that name, in any case of letters.
    pub(crate) fn named(name: &str) -> Result<&'static Self, DeviceError> {
        let found = DEVICES
            .iter()
            .find(|device| device.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| DeviceError::Unknown(name.to_owned()))
    }

    /// Peak operations a second.
    pub(crate) fn flops(&self, precision: Precision) -> Result<f64, DeviceError> {
        let teraflops = match precision {
            Precision::Bf16 => self.bf16_teraflops,
            Precision::Fp8 => self.fp8_teraflops.ok_or(DeviceError::NoFp8(self.name))?,
        };
        Ok(teraflops * 1e12)
    }

    /// Peak bytes of memory a second.
    pub(crate) fn memory_bytes(&self) -> f64 {
        self.memory_terabytes * 1e12
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_told_where_unknown() {
        assert_eq!(Device::named("H100").unwrap().name, "h100");
        let error = Device::named("h1000").unwrap_err().to_string();
        for device in &DEVICES {
            assert!(error.contains(device.name), "{error}");
        }
        assert!(error.contains("h1000"));
    }

    #[test]
    fn fp8_is_twice_bf16_or_not_there() {
        for device in &DEVICES {
            let bf16 = device.flops(Precision::Bf16).unwrap();
            match device.flops(Precision::Fp8) {
                Ok(fp8) => assert!((fp8 / bf16 - 2.0).abs() < 0.03, "{}", device.name),
                Err(error) => assert_eq!(error, DeviceError::NoFp8(device.name)),
            }
            assert!(device.memory_bytes() > 5e11 && !device.source.is_empty());
        }
    }
}
