//! Bytes of KV events to events.
//!
//! vLLM and SGLang publish batches over ZMQ in one encoding with small differences, which [`engine`]
//! reads; [`normalize`] turns its events into those of the index. Dynamo's event plane carries events
//! whose blocks are hashed already, which [`dynamo`] reads.

pub(crate) mod batch;
pub(crate) mod dynamo;
mod engine;
mod extra_keys;
pub(crate) mod groups;
mod msgpack;
pub(crate) mod normalize;
pub(crate) mod query;
pub(crate) mod skipped;
