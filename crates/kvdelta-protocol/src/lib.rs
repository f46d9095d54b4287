#![doc = include_str!("../README.md")]

mod block_size;
mod capability;
mod decode_cache_info;
mod offer;
mod stale;

pub use block_size::{Translated, UnequalBlocks, translate};
pub use capability::{CAPABILITY_KEY, CacheGroup, Capability, NoCapability};
pub use decode_cache_info::{BadClaim, DecodeCacheInfo, VERSION, deserialize_known};
pub use offer::{OFFER_KEY, cut_for};
pub use stale::{
    HELD_CLAIM_KEY, RELEASE_KEY, Recovered, STALE_CLAIM_KEY, StaleReason, StaleReport, held_claim,
    remote_request_id, stale_report,
};
