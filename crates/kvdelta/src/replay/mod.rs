// SPDX-License-Identifier: Apache-2.0

//! What several policies made of one trace: as a table, as JSON, as a chart, request by request.

pub(crate) mod chart;
pub(crate) mod choices;
pub(crate) mod report;
pub(crate) mod table;
