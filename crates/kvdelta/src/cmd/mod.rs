// SPDX-License-Identifier: Apache-2.0

//! The commands: each parses its options, calls, shows.

pub(crate) mod doctor;
pub(crate) mod estimate;
pub(crate) mod observe;
pub(crate) mod replay;
