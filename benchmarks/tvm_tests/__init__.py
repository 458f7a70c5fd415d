"""TVM's own tests of MetaSchedule, with our parts in the place of stock's."""
