// SPDX-License-Identifier: Apache-2.0

//! What keeps the flag from helping: readers fill [`facts`], [`check`] judges them.

pub(crate) mod check;
pub(crate) mod discovery;
pub(crate) mod etcd;
pub(crate) mod facts;
pub(crate) mod files;
pub(crate) mod finding;
pub(crate) mod http;
pub(crate) mod limit;
pub(crate) mod metrics;
pub(crate) mod prometheus;
pub(crate) mod store;
