"""What tests of several folders need: small models, servers, devices that are not there, processes, waiting."""
