//! What a worker-local indexer of Dynamo answers (dynamo-kv-router 1.6.1 `src/indexer/types.rs`,
//! `WorkerKvQueryResponse`).

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::wire::batch::BadBatch;
use crate::wire::dynamo::{RouterEvent, WireRouterEvent};
use crate::wire::msgpack::Cursor;
use crate::wire::skipped::shown;

/// The answer of a worker-local indexer to a question for events from a number on, or for all it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalAnswer {
    /// The events from the asked one on, with their own numbers. Those before the last clear of all may be
    /// left out.
    Events {
        /// In their order.
        events: Vec<RouterEvent>,
        /// The number of the last one that the indexer has.
        last_id: u64,
    },
    /// All that the rank holds, as stores with numbers that are made up. It replaces what was known.
    Dump {
        /// Parents before their children.
        events: Vec<RouterEvent>,
        /// The number of the last event that it includes.
        last_id: u64,
    },
    /// The asked number is above all that the indexer has: it counts anew, or nothing is missing.
    TooNew {
        /// The number of its last event.
        last_id: u64,
    },
    /// It cannot answer.
    Refused(String),
}

impl LocalAnswer {
    /// Reads an answer in MessagePack with named fields.
    ///
    /// # Errors
    /// If the bytes are none, or one of its events is none: a dump without one event is no dump.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadBatch> {
        let whole = Cursor::new(bytes).value();
        let whole = whole.ok_or(BadBatch::Broken(bytes.len()))?;
        let answer: Wire = rmp_serde::from_slice(whole).map_err(|_| BadBatch::Field {
            field: "answer",
            found: Cursor::new(bytes).found(),
        })?;
        let read =
            |events: Vec<WireRouterEvent>| events.into_iter().map(RouterEvent::from).collect();
        Ok(match answer {
            Wire::Events {
                events,
                last_event_id: last_id,
            } => Self::Events {
                events: read(events),
                last_id,
            },
            Wire::TreeDump {
                events,
                last_event_id: last_id,
                reset_scope: Scope::All,
            } => Self::Dump {
                events: read(events),
                last_id,
            },
            Wire::TreeDump { .. } => Self::Refused("a dump of a part of what it holds".to_owned()),
            Wire::TooNew { newest_available } => Self::TooNew {
                last_id: newest_available,
            },
            Wire::TreeDumpFailed { message } | Wire::Error(message) => {
                Self::Refused(shown(&message))
            }
            Wire::InvalidRange(IgnoredAny)
            | Wire::Status(IgnoredAny)
            | Wire::StateAgentRecovery(IgnoredAny) => {
                Self::Refused("something that was not asked for".to_owned())
            }
        })
    }
}

#[derive(Deserialize)]
enum Wire {
    Events {
        events: Vec<WireRouterEvent>,
        last_event_id: u64,
    },
    TreeDump {
        events: Vec<WireRouterEvent>,
        last_event_id: u64,
        #[serde(default)]
        reset_scope: Scope,
    },
    TreeDumpFailed {
        message: String,
    },
    TooNew {
        newest_available: u64,
    },
    InvalidRange(IgnoredAny),
    Status(IgnoredAny),
    StateAgentRecovery(IgnoredAny),
    Error(String),
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Scope {
    #[default]
    All,
    Domain(IgnoredAny),
}
