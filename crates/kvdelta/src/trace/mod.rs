// SPDX-License-Identifier: Apache-2.0

//! Requests to replay: traces from files, and made ones.

mod line;
mod read;
mod requests;
mod synthetic;

#[cfg(test)]
mod tests;

pub(crate) use line::Format;
pub(crate) use read::{Reading, read};
pub(crate) use requests::{Node, Request, Trace};
pub(crate) use synthetic::Synthetic;
