"""Tests. A package, because wheels of verl bring a package of that name too."""
