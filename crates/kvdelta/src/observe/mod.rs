// SPDX-License-Identifier: Apache-2.0

//! What live workers hold, from their KV events: [`reading`] is taken, [`snapshot`] is shown.

pub(crate) mod fleet;
pub(crate) mod prompt;
pub(crate) mod reading;
pub(crate) mod snapshot;
pub(crate) mod table;
pub(crate) mod worker;
