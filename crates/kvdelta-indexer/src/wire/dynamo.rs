//! Dynamo's event plane: envelopes, and the router events in them (dynamo-runtime 1.6.1
//! `src/transports/event_plane`, dynamo-kv-router 1.6.1 `src/protocols.rs`, `RouterEvent`).
//!
//! A publisher sends `Vec<RouterEvent>` as MessagePack with named fields, at most 128 events or 8,192
//! blocks unless one event is larger. Its blocks are hashed already. Stores all pass through it, removals
//! only when the last copy is gone (`dynamo-llm src/kv_router/publisher/dedup.rs`), hence
//! [`Copies::Single`].

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use crate::event::{Change, Copies, Source, Stored, StoredBlock};
use crate::ids::{BlockHash, DpRank, EngineHash, Tier, WorkerId, WorkerRank};
use crate::wire::batch::BadBatch;
use crate::wire::msgpack::Cursor;
use crate::wire::skipped::{Skipped, shown};

/// What the event plane puts around a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Envelope<'a> {
    /// Who sent it: an instance id of Dynamo's discovery.
    pub publisher_id: u64,
    /// Counts the publisher's envelopes.
    pub sequence: u64,
    /// When it was sent, in milliseconds since 1970 by the publisher's clock.
    pub published_at: u64,
    /// Where it was sent to.
    pub topic: &'a str,
    /// What it carries.
    pub payload: &'a [u8],
}

impl<'a> Envelope<'a> {
    /// Reads an envelope.
    ///
    /// # Errors
    ///
    /// If the bytes are none.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, BadBatch> {
        whole(bytes)?;
        rmp_serde::from_slice(bytes).map_err(|_| BadBatch::Field {
            field: "envelope",
            found: Cursor::new(bytes).found(),
        })
    }
}

/// One event of a Dynamo publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterEvent {
    /// Whose cache.
    pub of: WorkerRank,
    /// Counts the rank's events. In a dump it is made up.
    pub id: u64,
    /// What happened. A skipped event has its number all the same, so that it makes no gap.
    pub change: Result<Change, Skipped>,
}

/// The events of one payload in their order, decoded one by one as they are asked for. One that cannot
/// be read is an `Err`, and the next one follows.
///
/// # Errors
///
/// If the payload is not an array of values.
pub fn router_events(
    payload: &[u8],
) -> Result<impl Iterator<Item = Result<RouterEvent, Skipped>>, BadBatch> {
    let mut events = Cursor::new(whole(payload)?);
    let len = events.array().ok_or_else(|| BadBatch::Field {
        field: "events",
        found: events.found(),
    })?;
    Ok((0..len).map_while(move |_| {
        let event = events.value()?;
        let event = rmp_serde::from_slice::<WireRouterEvent>(event);
        Some(event.map(RouterEvent::from).map_err(|error| {
            let found = shown(&error.to_string());
            Skipped::Malformed {
                event: "router",
                field: "whole",
                found,
            }
        }))
    }))
}

fn whole(bytes: &[u8]) -> Result<&[u8], BadBatch> {
    let whole = Cursor::new(bytes).value();
    whole.ok_or(BadBatch::Broken(bytes.len()))
}

/// Dynamo's `RouterEvent` as it is serialized, for dumps in other formats than the event plane's.
///
/// Unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct WireRouterEvent {
    worker_id: u64,
    #[serde(default)]
    storage_tier: Option<String>,
    #[serde(default, deserialize_with = "present")]
    residency_domain: Option<Option<String>>,
    event: CacheEvent,
    #[serde(default, deserialize_with = "lenient")]
    source: Option<Source>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct CacheEvent {
    event_id: u64,
    data: Data,
    #[serde(default)]
    dp_rank: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Data {
    Stored(StoreData),
    Removed(RemoveData),
    Cleared,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct StoreData {
    parent_hash: Option<u64>,
    #[serde(default)]
    start_position: Option<u32>,
    blocks: Vec<BlockData>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct BlockData {
    block_hash: u64,
    tokens_hash: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct RemoveData {
    block_hashes: Vec<u64>,
}

/// `Some(None)`: the field is there and no name of an owner.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<String>>, D::Error> {
    Ok(Some(NameOrOther::deserialize(from)?.name()))
}

/// A hint that nothing rests on: what is not understood counts as not said.
fn lenient<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Source>, D::Error> {
    Ok(match NameOrOther::deserialize(from)?.name().as_deref() {
        Some("local") => Some(Source::Local),
        Some("transferred") => Some(Source::Transferred),
        _ => None,
    })
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NameOrOther {
    Name(String),
    Other(IgnoredAny),
}

impl NameOrOther {
    fn name(self) -> Option<String> {
        match self {
            Self::Name(name) => Some(name),
            Self::Other(IgnoredAny) => None,
        }
    }
}

impl From<WireRouterEvent> for RouterEvent {
    fn from(wire: WireRouterEvent) -> Self {
        let WireRouterEvent {
            worker_id,
            storage_tier,
            residency_domain,
            event,
            source,
        } = wire;
        Self {
            of: WorkerRank {
                worker: WorkerId(worker_id),
                rank: DpRank(event.dp_rank),
            },
            id: event.event_id,
            change: tier(storage_tier.as_deref())
                .and_then(|tier| owned(residency_domain, tier).map(|()| tier))
                .and_then(|tier| change(event.data, tier, source)),
        }
    }
}

fn tier(name: Option<&str>) -> Result<Tier, Skipped> {
    match name {
        None | Some("device") => Ok(Tier::Device),
        Some("host_pinned") => Ok(Tier::Host),
        Some("disk") => Ok(Tier::Disk),
        Some("external") => Err(Skipped::SharedStorage("external".to_owned())),
        Some(unknown) => Err(Skipped::UnknownMedium(shown(unknown))),
    }
}

fn owned(domain: Option<Option<String>>, tier: Tier) -> Result<(), Skipped> {
    match domain.as_ref().map(Option::as_deref) {
        None | Some(Some("worker")) => Ok(()),
        Some(Some("cache_owner")) => Err(Skipped::OtherOwner("cache_owner".to_owned())),
        Some(unknown) => Err(Skipped::UnknownOwner {
            owner: shown(unknown.unwrap_or_default()),
            tier,
        }),
    }
}

fn change(data: Data, tier: Tier, source: Option<Source>) -> Result<Change, Skipped> {
    match data {
        Data::Stored(StoreData {
            parent_hash: None,
            start_position: Some(position @ 1..),
            blocks: _,
        }) => Err(Skipped::NoParent(position)),
        Data::Stored(StoreData {
            parent_hash,
            start_position: _,
            blocks,
        }) => {
            let blocks = blocks.into_iter().map(|block| StoredBlock {
                block: BlockHash(block.tokens_hash),
                engine: EngineHash(block.block_hash),
            });
            Ok(Change::Stored(Stored {
                tier,
                parent: parent_hash.map(EngineHash),
                namespace: None,
                blocks: blocks.collect(),
                copies: Copies::Single,
                source,
            }))
        }
        Data::Removed(RemoveData { block_hashes }) => Ok(Change::Removed {
            tier,
            engine_hashes: block_hashes.into_iter().map(EngineHash).collect(),
        }),
        Data::Cleared => Ok(Change::Cleared),
    }
}
