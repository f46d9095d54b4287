#![doc = include_str!("../README.md")]

mod capability;
mod decode_cache_info;
mod offer;

pub use capability::{CAPABILITY_KEY, CacheGroup, Capability, NoCapability};
pub use decode_cache_info::{BadClaim, DecodeCacheInfo, VERSION, deserialize_known};
pub use offer::{OFFER_KEY, cut_for};
