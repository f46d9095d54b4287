// SPDX-License-Identifier: Apache-2.0

//! What the KV cache of a model weighs: its shape, and how TP splits it.

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

/// Most bytes that a token may have over all ranks; keeps every product below within 64 bits.
const MAX_TOKEN_BYTES: u64 = 1 << 36;

/// Values that share a scale in NVFP4.
const NVFP4_SCALED_TOGETHER: u64 = 16;

/// Latent and rotary dimensions that the packed MLA formats are made for.
const DS_MLA: (u64, u64) = (512, 64);

/// A shape that no engine could serve, or that is not covered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum ModelError {
    #[error("unknown dtype `{0}`: one of {known}; vLLM's names do as well", known = Dtype::known())]
    UnknownDtype(String),
    #[error("the model has no layers")]
    NoLayers,
    #[error("{what} is 0")]
    Zero { what: &'static str },
    #[error("nvfp4 takes vectors of a multiple of {NVFP4_SCALED_TOGETHER} values, and one has {0}")]
    NotScalable(u64),
    #[error("{dtype} is the format of an MLA cache of {} + {} values", DS_MLA.0, DS_MLA.1)]
    NotPacked { dtype: Dtype },
    #[error("an MLA latent is not stored as {dtype}; nvfp4_ds_mla is the packed format")]
    NoLatent { dtype: Dtype },
    #[error(
        "{kv_heads} KV heads cannot be split over TP {tp}: one must be a multiple of the other"
    )]
    UnevenHeads { kv_heads: u64, tp: u64 },
    #[error("more than {MAX_TOKEN_BYTES} bytes a token over all ranks")]
    TooLarge,
}

/// How the cache stores a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    Bf16,
    Fp16,
    Fp32,
    /// E4M3 or E5M2, with one scale a tensor that is no part of the cache.
    Fp8,
    /// Two values a byte and one FP8 scale for 16 of them, in the cache beside them: vLLM
    /// `nvfp4_kv_cache_full_dim` (`head_size / 2 + head_size / 16` bytes a head), TensorRT-LLM
    /// `get_cache_bytes_per_token` (`quant_vector_size=16, scaling_factor_dtype=FP8`).
    Nvfp4,
    /// 656 bytes a token and layer: 512 FP8 values, 4 FP32 scales, 64 BF16 rotary values (vLLM
    /// `flashmla_sparse.py`).
    Fp8DsMla,
    /// 352 bytes a token and layer: 512 FP4 values, 32 FP8 scales, 64 FP8 rotary values (same).
    Nvfp4DsMla,
}

impl Dtype {
    const NAMES: [(&'static str, Self); 7] = [
        ("bf16", Self::Bf16),
        ("fp16", Self::Fp16),
        ("fp32", Self::Fp32),
        ("fp8", Self::Fp8),
        ("nvfp4", Self::Nvfp4),
        ("fp8_ds_mla", Self::Fp8DsMla),
        ("nvfp4_ds_mla", Self::Nvfp4DsMla),
    ];

    /// Names of the same in vLLM and in config files.
    const OTHER_NAMES: [(&'static str, Self); 8] = [
        ("bfloat16", Self::Bf16),
        ("float16", Self::Fp16),
        ("half", Self::Fp16),
        ("float32", Self::Fp32),
        ("float", Self::Fp32),
        ("fp8_e4m3", Self::Fp8),
        ("fp8_e5m2", Self::Fp8),
        ("nvfp4_4over6", Self::Nvfp4),
    ];

    fn known() -> String {
        Self::NAMES.map(|(name, _)| name).join(", ")
    }

    /// The name that [`Dtype::from_str`] takes.
    pub(crate) fn name(self) -> &'static str {
        let named = Self::NAMES.iter().find(|(_, dtype)| *dtype == self);
        named.map_or("", |(name, _)| name)
    }

    /// Bytes of a vector of so many values, its scales with it.
    fn vector_bytes(self, values: u64) -> Result<u64, ModelError> {
        let bytes = match self {
            Self::Bf16 | Self::Fp16 => values.checked_mul(2),
            Self::Fp32 => values.checked_mul(4),
            Self::Fp8 => Some(values),
            Self::Nvfp4 if values.is_multiple_of(NVFP4_SCALED_TOGETHER) => {
                Some(values / 2 + values / NVFP4_SCALED_TOGETHER)
            }
            Self::Nvfp4 => return Err(ModelError::NotScalable(values)),
            Self::Fp8DsMla | Self::Nvfp4DsMla => {
                return Err(ModelError::NotPacked { dtype: self });
            }
        };
        bytes.ok_or(ModelError::TooLarge)
    }

    /// Bytes of an MLA latent of one token and layer.
    fn latent_bytes(self, rank: u64, rope_dim: u64) -> Result<u64, ModelError> {
        match self {
            Self::Fp8DsMla | Self::Nvfp4DsMla if (rank, rope_dim) != DS_MLA => {
                Err(ModelError::NotPacked { dtype: self })
            }
            Self::Fp8DsMla => Ok(656),
            Self::Nvfp4DsMla => Ok(352),
            Self::Nvfp4 => Err(ModelError::NoLatent { dtype: self }),
            Self::Bf16 | Self::Fp16 | Self::Fp32 | Self::Fp8 => {
                self.vector_bytes(rank.checked_add(rope_dim).ok_or(ModelError::TooLarge)?)
            }
        }
    }
}

impl Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let name = text.to_ascii_lowercase();
        let mut names = Self::NAMES.iter().chain(&Self::OTHER_NAMES);
        match names.find(|(known, _)| *known == name) {
            Some((_, dtype)) => Ok(*dtype),
            None => Err(ModelError::UnknownDtype(text.to_owned())),
        }
    }
}

/// What a layer keeps of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Cache {
    /// A key and a value a head. TP splits the heads; where it is larger, ranks hold copies.
    Heads {
        kv_heads: u64,
        key_dim: u64,
        value_dim: u64,
    },
    /// MLA: one latent and one rotary key for all heads, whole on every rank.
    Latent { rank: u64, rope_dim: u64 },
}

/// Layers of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Layers {
    pub(crate) count: u64,
    /// `None`: they keep the whole prompt.
    pub(crate) window_tokens: Option<u64>,
}

/// The shape of a model's KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    cache: Cache,
    layers: Vec<Layers>,
    dtype: Dtype,
    /// Bytes of a token in one layer: of a head, or of the latent.
    unit_bytes: u64,
}

impl Shape {
    /// Fails where a count is zero, or the dtype does not store such a cache.
    pub(crate) fn new(cache: Cache, layers: Vec<Layers>, dtype: Dtype) -> Result<Self, ModelError> {
        let unit_bytes = match cache {
            Cache::Heads {
                kv_heads,
                key_dim,
                value_dim,
            } => {
                not_zero("the number of KV heads", kv_heads)?;
                not_zero("the head dimension", key_dim.min(value_dim))?;
                let (key, value) = (dtype.vector_bytes(key_dim)?, dtype.vector_bytes(value_dim)?);
                key.checked_add(value).ok_or(ModelError::TooLarge)?
            }
            Cache::Latent { rank, rope_dim } => {
                not_zero("the rank of the latent", rank)?;
                dtype.latent_bytes(rank, rope_dim)?
            }
        };
        let layers: Vec<_> = layers.into_iter().filter(|of| of.count > 0).collect();
        if layers.is_empty() {
            return Err(ModelError::NoLayers);
        }
        for window_tokens in layers.iter().filter_map(|of| of.window_tokens) {
            not_zero("the window", window_tokens)?;
        }
        let shape = Self {
            cache,
            layers,
            dtype,
            unit_bytes,
        };
        shape.token_bytes(1)?;
        Ok(shape)
    }

    pub(crate) fn cache(&self) -> Cache {
        self.cache
    }

    pub(crate) fn layers(&self) -> &[Layers] {
        &self.layers
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Units (heads, or the latent) of a layer on each of `tp` ranks.
    fn units_a_rank(&self, tp: u64) -> Result<u64, ModelError> {
        not_zero("TP", tp)?;
        match self.cache {
            Cache::Latent { .. } => Ok(1),
            Cache::Heads { kv_heads, .. } if kv_heads.is_multiple_of(tp) => Ok(kv_heads / tp),
            Cache::Heads { kv_heads, .. } if tp.is_multiple_of(kv_heads) => Ok(1),
            Cache::Heads { kv_heads, .. } => Err(ModelError::UnevenHeads { kv_heads, tp }),
        }
    }

    /// Ranks that hold the same bytes.
    pub(crate) fn copies(&self, tp: u64) -> Result<u64, ModelError> {
        let units = self.units_a_rank(tp)?;
        Ok(match self.cache {
            Cache::Latent { .. } => tp,
            Cache::Heads { kv_heads, .. } => units * tp / kv_heads,
        })
    }

    /// Bytes of a token in one layer on one of `tp` ranks.
    pub(crate) fn layer_token_bytes(&self, tp: u64) -> Result<u64, ModelError> {
        let units = self.units_a_rank(tp)?;
        let bytes = units.checked_mul(self.unit_bytes);
        bytes.ok_or(ModelError::TooLarge)
    }

    /// Bytes of a token on one of `tp` ranks, in layers with and without a window.
    pub(crate) fn token_bytes(&self, tp: u64) -> Result<u64, ModelError> {
        let layer = self.layer_token_bytes(tp)?;
        let layers = self.layers.iter().map(|of| of.count);
        let count = layers.fold(0_u64, u64::saturating_add);
        let rank = layer.checked_mul(count).ok_or(ModelError::TooLarge)?;
        let all = rank.checked_mul(tp).ok_or(ModelError::TooLarge)?;
        if all > MAX_TOKEN_BYTES {
            return Err(ModelError::TooLarge);
        }
        Ok(rank)
    }
}

fn not_zero(what: &'static str, value: u64) -> Result<(), ModelError> {
    if value == 0 {
        return Err(ModelError::Zero { what });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
