//! Where events come from: sockets, replay requests and back-pressure, nothing else.
//!
//! Order, gaps, restarts and trust are decided by `stream`, `trust` and `ingest`, bytes are read by
//! `wire`. A feed only says what it heard, and asks again for what it is told to ask for.

mod decode;
mod follow;
#[cfg(feature = "nats")]
pub mod nats;
mod queue;
mod source;
#[cfg(all(test, feature = "zmq"))]
mod test_ports;
#[cfg(feature = "zmq")]
pub mod zmq;

pub use decode::{Decoder, Payload};
pub use follow::{Admission, Control, Follower, Settings};
pub use queue::{Counts, FeedId, Heard, Inlet, Limits, Outlet, Tap, queue};
pub use source::{Answer, Frame, LocalIndexers, Origin, RecoverError, Signal, Source};
