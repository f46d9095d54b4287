//! From the bytes that a worker sends to what the index says.

mod cases;
mod dynamo;
mod event_plane;
mod fleet;
mod hostile;
mod sglang;
