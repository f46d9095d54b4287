// SPDX-License-Identifier: Apache-2.0

//! How long a worker computes on a part of a prompt.
//!
//! Two operations for each parameter that a token meets (Pope et al., "Efficiently Scaling
//! Transformer Inference", section 2), and where the query heads are known those of attention:
//! `2 x (key + value dimension)` a head, layer and pair of a token with one before it or itself.

use super::device::{Device, DeviceError, Precision};
use super::model::Layers;

/// The query heads of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attention {
    pub(crate) heads: u64,
    pub(crate) key_dim: u64,
    pub(crate) value_dim: u64,
}

/// Operations of a model, by tokens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Work {
    /// Parameters that each token is multiplied with: of experts those that it meets.
    pub(crate) params: f64,
    /// `None`: attention is left out.
    pub(crate) attention: Option<Attention>,
    pub(crate) layers: Vec<Layers>,
}

impl Work {
    /// Operations on the parameters for `tokens`.
    pub(crate) fn matrix_flops(&self, tokens: u64) -> f64 {
        2.0 * self.params * tokens as f64
    }

    /// Operations of attention for the tokens `from..to` of a prompt.
    pub(crate) fn attention_flops(&self, from: u64, to: u64) -> f64 {
        let Some(attention) = self.attention else {
            return 0.0;
        };
        let dims = (attention.key_dim + attention.value_dim) as f64;
        let pair = 2.0 * dims * attention.heads as f64;
        let layers = self.layers.iter().map(|of| {
            let pairs = pairs(to, of.window_tokens) - pairs(from, of.window_tokens);
            of.count as f64 * pairs
        });
        pair * layers.sum::<f64>()
    }
}

/// Pairs of attention among the first `tokens`: each sees itself and those before, within a window.
fn pairs(tokens: u64, window_tokens: Option<u64>) -> f64 {
    let tokens = tokens as f64;
    let window = window_tokens.map_or(tokens, |window| tokens.min(window as f64));
    window * (window + 1.0) / 2.0 + (tokens - window) * window
}

/// How fast D computes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Speed {
    /// Tokens a second, as measured.
    Rate(f64),
    /// By a device's peaks.
    Peaks {
        work: Work,
        /// Operations a second, of all devices, after utilisation.
        flops: f64,
        /// Seconds to read the parameters once, of all devices, at their memory's peak.
        read_seconds: f64,
    },
}

impl Speed {
    /// By the peaks of `count` devices, of which `utilisation` is reached in computing.
    pub(crate) fn of_device(
        work: Work,
        device: &Device,
        precision: Precision,
        count: u64,
        utilisation: f64,
    ) -> Result<Self, DeviceError> {
        let count = count as f64;
        Ok(Self::Peaks {
            flops: device.flops(precision)? * count * utilisation,
            read_seconds: work.params * precision.weight_bytes() / (device.memory_bytes() * count),
            work,
        })
    }

    /// Seconds for the tokens `from..to` of a prompt, at least those of reading the parameters.
    pub(crate) fn seconds(&self, from: u64, to: u64) -> f64 {
        let tokens = to.saturating_sub(from);
        if tokens == 0 {
            return 0.0;
        }
        match self {
            Self::Rate(tokens_a_second) => tokens as f64 / tokens_a_second,
            Self::Peaks {
                work,
                flops,
                read_seconds,
            } => {
                let all = work.matrix_flops(tokens) + work.attention_flops(from, to);
                (all / flops).max(*read_seconds)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(window_tokens: Option<u64>) -> Work {
        Work {
            params: 10.0,
            attention: Some(Attention {
                heads: 3,
                key_dim: 4,
                value_dim: 2,
            }),
            layers: vec![Layers {
                count: 5,
                window_tokens,
            }],
        }
    }

    #[test]
    fn attention_is_counted_pair_by_pair() {
        for window in [None, Some(1), Some(3), Some(7), Some(100)] {
            for (from, to) in [(0, 1), (0, 9), (2, 9), (5, 6), (9, 9)] {
                let pairs = (from..to).map(|at: u64| (at + 1).min(window.unwrap_or(u64::MAX)));
                let expected = 2 * (4 + 2) * 3 * 5 * pairs.sum::<u64>();
                let counted = work(window).attention_flops(from, to);
                assert_eq!(counted, expected as f64, "{window:?} {from}..{to}");
            }
        }
    }

    #[test]
    fn a_short_part_takes_as_long_as_reading_the_parameters() {
        let device = Device::named("h100").unwrap();
        let work = Work {
            params: 70e9,
            attention: None,
            layers: Vec::new(),
        };
        let speed = Speed::of_device(work, device, Precision::Bf16, 8, 0.5).unwrap();
        // 140 GB at 26.8 TB/s.
        assert!((speed.seconds(0, 1) - 140.0 / 26_800.0).abs() < 1e-9);
        assert_eq!(speed.seconds(0, 1), speed.seconds(99, 107));
        // 1.4e11 operations a token at 3,957.6e12 a second.
        let long = 1e5 * 1.4e11 / (0.5 * 8.0 * 989.4e12);
        assert!((speed.seconds(0, 100_000) - long).abs() < 1e-9);
        assert_eq!(speed.seconds(5, 5), 0.0);
    }

    #[test]
    fn a_rate_is_a_rate() {
        assert_eq!(Speed::Rate(500.0).seconds(1000, 2000), 2.0);
    }
}
