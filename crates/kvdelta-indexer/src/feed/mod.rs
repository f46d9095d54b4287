//! Where events come from: sockets, replay requests and back-pressure, nothing else.
//!
//! Order, gaps, restarts and trust are decided by `stream`, `trust` and `ingest`, bytes are read by
//! `wire`. A feed only says what it heard, and asks again for what it is told to ask for.

#[cfg(feature = "nats")]
pub mod nats;
mod queue;
mod source;
#[cfg(feature = "zmq")]
pub mod zmq;

pub use queue::{Counts, Heard, Inlet, Limits, Outlet, Tap, queue};
pub use source::{Answer, Frame, LocalIndexers, Origin, RecoverError, Signal, Source};
