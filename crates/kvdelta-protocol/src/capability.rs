//! What a decode worker advertises in its runtime data.

use std::ops::Not;

use kvdelta_indexer::BlockSize;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use crate::decode_cache_info::VERSION;

/// Key of [`Capability`] in a worker's runtime data.
pub const CAPABILITY_KEY: &str = "decode_cache_info";

/// What a decode worker says of its cache, and whether claims about it are settled; absent: it does not
/// know them.
///
/// Unknown fields are ignored, so that a later worker can say more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// The highest version of `DecodeCacheInfo` that its connector settles, and all below it. 0: none,
    /// whatever else is said.
    pub version: u32,
    /// Tokens in a block of its cache.
    pub block_size: BlockSize,
    /// Whether it looks prompts up in its cache at all.
    pub prefix_caching: bool,
    /// Kinds of its cache groups, an entry for each group.
    pub cache_groups: Vec<CacheGroup>,
    /// Whether what it tells prefill of its cache includes blocks below device memory, which it may then
    /// be unable to load.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub lower_tiers: bool,
}

/// A kind of KV cache group; whatever else a later worker writes for one is [`CacheGroup::Unknown`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CacheGroup {
    /// Every token's KV is kept.
    FullAttention,
    /// The same with one latent for all heads.
    MlaAttention,
    /// Only a window's is.
    SlidingWindow,
    /// A state, not a list of blocks.
    Mamba,
    /// A kind that this reader does not know, or that the worker could not tell.
    Unknown,
}

impl<'de> Deserialize<'de> for CacheGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Said {
            Name(String),
            Other(IgnoredAny),
        }
        Ok(match Said::deserialize(deserializer)? {
            Said::Name(name) => match name.as_str() {
                "full_attention" => Self::FullAttention,
                "mla_attention" => Self::MlaAttention,
                "sliding_window" => Self::SlidingWindow,
                "mamba" => Self::Mamba,
                _ => Self::Unknown,
            },
            Said::Other(_) => Self::Unknown,
        })
    }
}

/// Why a worker gets no claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoCapability {
    /// It advertises nothing, or something that cannot be read.
    #[error("the worker does not advertise {CAPABILITY_KEY}")]
    NotAdvertised,
    /// It settles none, or older claims only.
    #[error("the worker settles claims of version {0}, written are those of version {VERSION}")]
    Version(u32),
    /// Its prefix cache is off.
    #[error("the worker's prefix caching is off")]
    PrefixCachingOff,
    /// Its blocks are not those that the router hashes.
    #[error(
        "the worker has blocks of {worker_tokens} tokens, the router hashes blocks of {router_tokens}"
    )]
    BlockSize {
        /// What the worker says.
        worker_tokens: u32,
        /// What the router's index has.
        router_tokens: u32,
    },
    /// It has a cache group of which not every prefix can be reused.
    #[error(
        "a cache group of the worker is of kind {0:?}, whose blocks do not make a prefix reusable"
    )]
    CacheGroup(CacheGroup),
    /// It names no cache group.
    #[error("the worker names no cache group")]
    NoCacheGroups,
}

impl NoCapability {
    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::NotAdvertised => "not_advertised",
            Self::Version(_) => "version",
            Self::PrefixCachingOff => "prefix_caching_off",
            Self::BlockSize { .. } => "block_size",
            Self::CacheGroup(_) | Self::NoCacheGroups => "cache_groups",
        }
    }
}

impl Capability {
    /// Whether a claim in blocks of `block_size` may be made about the worker.
    ///
    /// # Errors
    /// Why not, see [`NoCapability`].
    pub fn check(&self, block_size: BlockSize) -> Result<(), NoCapability> {
        if self.version < VERSION {
            return Err(NoCapability::Version(self.version));
        }
        if !self.prefix_caching {
            return Err(NoCapability::PrefixCachingOff);
        }
        if self.block_size != block_size {
            return Err(NoCapability::BlockSize {
                worker_tokens: self.block_size.into(),
                router_tokens: block_size.into(),
            });
        }
        if self.cache_groups.is_empty() {
            return Err(NoCapability::NoCacheGroups);
        }
        let whole = [CacheGroup::FullAttention, CacheGroup::MlaAttention];
        match self
            .cache_groups
            .iter()
            .find(|group| !whole.contains(group))
        {
            Some(group) => Err(NoCapability::CacheGroup(*group)),
            None => Ok(()),
        }
    }
}
