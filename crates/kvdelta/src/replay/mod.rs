// SPDX-License-Identifier: Apache-2.0

//! What several policies made of one trace: as a table, as JSON, as a chart.

pub(crate) mod chart;
pub(crate) mod report;
pub(crate) mod table;
