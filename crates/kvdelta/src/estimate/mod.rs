// SPDX-License-Identifier: Apache-2.0

//! What a transfer weighs and takes, by formula: [`model`] and [`config`] give bytes a token,
//! [`work`] and [`device`] the time to compute, [`transfer`] the rest.

pub(crate) mod config;
pub(crate) mod device;
pub(crate) mod model;
pub(crate) mod report;
pub(crate) mod rfc;
pub(crate) mod table;
pub(crate) mod transfer;
pub(crate) mod work;
