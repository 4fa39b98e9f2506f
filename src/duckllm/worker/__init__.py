"""A worker process: map weights, bind, hand control to the native step loop. Imports no torch."""
